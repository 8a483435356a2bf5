"""How each peer is called: other implementations of prefill and of decode, all through PyTorch.

fla                    flash-linear-attention's chunk_kda (package fla-core, Triton)
cudnn_fused            cuDNN's CUDA engine for Hopper (package nvidia-cudnn-frontend), raw inputs; f32 gates
                       and beta, which its kernel reads as they are
cudnn_exact            its CuTe DSL engine (needs nvidia-cutlass-dsl too), which wants prepared inputs: q and
                       k normalised, log decays, activated beta. The passes that make them are not timed.
fla_recurrent          flash-linear-attention's fused_recurrent_kda: decode, a new state every call
fla_recurrent_inplace  its kernel as serving calls it: the state updated where it lies, o preallocated
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .shapes import Shape

__all__ = ["DECODE_PEERS", "PEERS", "Call", "Peer", "importable"]

LOWER_BOUND = -5.0

# A call without arguments that returns o and the final state.
Call = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Peer:
    package: str  # that brings it
    module: str  # that must be importable
    make: Callable[[Shape, dict[str, Any]], Call]  # from arrays by the names of kda_prefill's arguments
    v_first: bool = False  # the state that comes back is [N, HV, V, K]
    tunes: bool = False  # compiles, and chooses among, many kernels for every number of heads


def importable(peers: dict[str, Peer]) -> tuple[dict[str, str], dict[str, str]]:
    """Of these peers: those that are there, with their versions, and those that are not, with the reason."""
    there: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, peer in peers.items():
        try:
            importlib.import_module("torch")
            importlib.import_module(peer.module)
            there[name] = f"{peer.package} {importlib.metadata.version(peer.package)}"
        except Exception as error:  # whatever is wrong with a peer, the others are timed
            missing[name] = f"{peer.package}: {type(error).__name__}: {error}"
    return there, missing


def _fla_options(shape: Shape, x: dict[str, Any]) -> dict[str, Any]:
    """What both of flash-linear-attention's functions take alike."""
    options = {
        **{name: x[name] for name in ("q", "k", "v", "g", "beta")},
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    if shape.gate != "log":
        options |= {"use_gate_in_kernel": True, "A_log": x["A_log"], "dt_bias": x["dt_bias"].reshape(-1)}
    if shape.gate == "safe":
        options["lower_bound"] = LOWER_BOUND
    return options


def _fla(shape: Shape, x: dict[str, Any]) -> Call:
    from fla.ops.kda import chunk_kda

    options = _fla_options(shape, x)
    if shape.gate == "safe":
        options["safe_gate"] = True
    if shape.lengths:  # with the host's copy no call waits for the device
        options |= {"cu_seqlens": x["cu_seqlens"].long(), "cu_seqlens_cpu": x["cu_seqlens"].long().cpu()}
    return lambda: chunk_kda(**options, initial_state=x["initial_state"], output_final_state=True)


def _fla_recurrent(shape: Shape, x: dict[str, Any]) -> Call:
    from fla.ops.kda import fused_recurrent_kda

    options = _fla_options(shape, x)
    return lambda: fused_recurrent_kda(**options, initial_state=x["initial_state"], output_final_state=True)


def _fla_recurrent_inplace(shape: Shape, x: dict[str, Any]) -> Call:
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    options = _fla_options(shape, x) | {"out": torch.empty_like(x["v"])}
    state = x["initial_state"].clone()  # the judge still needs the one before
    return lambda: fused_recurrent_kda_fwd(**options, initial_state=state, inplace_final_state=True)


def _cudnn_fused(shape: Shape, x: dict[str, Any]) -> Call:
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if shape.gate == "safe":
        options |= {"safe_gate": True, "gate_lower_bound": LOWER_BOUND}
        options |= {"a_log": x["A_log"], "dt_bias": x["dt_bias"]}
    elif shape.gate == "softplus":
        raise NotImplementedError("it has no softplus gate")
    ready = {"g": x["g"].float(), "beta": x["beta"].float()}
    return _cudnn("kda_hopper_cuda", shape, x | ready, options)


def _cudnn_exact(shape: Shape, x: dict[str, Any]) -> Call:
    import torch

    def normalised(a: Any) -> Any:
        wide = a.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(a.dtype)

    if shape.H != shape.HV:
        raise NotImplementedError("it has no grouped heads")
    importlib.import_module("cutlass")  # says itself that it is not there; cuDNN says "no such plan"
    g = x["g"].float()
    if shape.gate == "safe":
        g = LOWER_BOUND * torch.sigmoid(x["A_log"].exp()[:, None] * (g + x["dt_bias"]))
    elif shape.gate == "softplus":
        g = -x["A_log"].exp()[:, None] * torch.nn.functional.softplus(g + x["dt_bias"])
    ready = {"q": normalised(x["q"]), "k": normalised(x["k"]), "g": g, "beta": x["beta"].float().sigmoid()}
    return _cudnn("kda_hopper", shape, x | ready, {})


def _cudnn(plan: str, shape: Shape, x: dict[str, Any], options: dict[str, Any]) -> Call:
    import torch
    from cudnn.linear_attention import kimi_delta_attention

    tokens = shape.B * shape.T
    flat = [x[name].reshape(tokens, *x[name].shape[2:]).contiguous() for name in ("q", "k", "v", "g", "beta")]
    lengths = shape.lengths or (shape.T,) * shape.B
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=flat[0].device)
    state = x["initial_state"].transpose(-1, -2).contiguous()

    def call() -> tuple[Any, Any]:
        try:
            o, final_state = kimi_delta_attention(
                *flat, offsets, initial_state=state, output_final_state=True, plan_name=plan, **options
            )
        except Exception:
            # A plan that could not be pinned leaves its graph in cuDNN's cache, unpinned: the next call of
            # the same shape would run another engine under this one's name.
            importlib.import_module("cudnn.linear_attention.ops.kda").fprop_cache.clear()
            raise
        return o, final_state

    return call


_CUDNN = ("nvidia-cudnn-frontend", "cudnn.linear_attention.ops")

PEERS = {
    "fla": Peer("fla-core", "fla.ops.kda", _fla, tunes=True),
    "cudnn_fused": Peer(*_CUDNN, _cudnn_fused, v_first=True),
    "cudnn_exact": Peer(*_CUDNN, _cudnn_exact, v_first=True),
}
DECODE_PEERS = {
    "fla_recurrent": Peer("fla-core", "fla.ops.kda", _fla_recurrent),
    "fla_recurrent_inplace": Peer("fla-core", "fla.ops.kda", _fla_recurrent_inplace),
}
