"""Kimi Delta Attention for JAX: the prefill operation, on every platform, with CUDA kernels where they serve.

    o, state = jax_kda.kda_prefill(q, k, v, g, beta)

`explain_route` says which implementation a call takes and why; `status` what the compiled extension brought.
"""

from .api import explain_route, export_checks, kda_decode, kda_prefill
from .checkpoints import checkpoint_offsets
from .contract import check_cu_seqlens
from .ffi import status
from .reference import kda_reference
from .routing import Route

__all__ = [
    "Route",
    "check_cu_seqlens",
    "checkpoint_offsets",
    "explain_route",
    "export_checks",
    "kda_decode",
    "kda_prefill",
    "kda_reference",
    "status",
]

# Registers the kernels with XLA: executables from a cache or from jax.export find them by name, untraced.
status()
