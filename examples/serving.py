"""A serving loop in miniature: prompts of different lengths prefilled as one packed batch, then decoded.

    python examples/serving.py

The model is one Kimi-style block between an embedding and a head: projections, a short causal convolution,
the gates, KDA, a gated RMS norm, an output projection. What a server keeps per sequence (the recurrent state
and the convolution's last inputs) lies in pools with one slot a sequence; a call names its sequences' slots,
-1 for places in the batch that are empty. All 64 steps run inside one jitted loop to which the pools are
donated, so that on a GPU each step reads and writes the named states where they lie.

At the end the same tokens go through the model again, sequence by sequence and token by token, without any
cache: `kda_reference` judges.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_kda

TAPS = 4  # of the short convolution
KDA_OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
    "use_beta_sigmoid_in_kernel": True,
}

Params = dict[str, jax.Array]


class Sizes(NamedTuple):
    vocabulary: int = 512
    width: int = 256
    heads: int = 4
    channels: int = 128  # of a head, keys and values alike; the CUDA kernels take 128
    rank: int = 64  # of the two gates' projections


class Cache(NamedTuple):
    """The pools of P slots."""

    inputs: (
        jax.Array
    )  # [P, TAPS - 1, 3 * heads * channels]: the convolution's last inputs, the latest one last
    states: jax.Array  # [P, heads, channels, channels] float32


def make_params(sizes: Sizes, dtype: Any, seed: int = 0) -> Params:
    shapes = {
        "embedding": (sizes.vocabulary, sizes.width),
        "qkv": (sizes.width, 3 * sizes.heads * sizes.channels),
        "decay_down": (sizes.width, sizes.rank),
        "decay_up": (sizes.rank, sizes.heads * sizes.channels),
        "beta": (sizes.width, sizes.heads),
        "gate_down": (sizes.width, sizes.rank),
        "gate_up": (sizes.rank, sizes.heads * sizes.channels),
        "output": (sizes.heads * sizes.channels, sizes.width),
        "head": (sizes.width, sizes.vocabulary),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 3)
    params = {
        name: (jax.random.normal(key, shape) / shape[0] ** 0.5).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    params["embedding"] = (params["embedding"] * sizes.vocabulary**0.5).astype(dtype)
    params["taps"] = (jax.random.normal(keys[-3], (TAPS, shapes["qkv"][1])) / TAPS**0.5).astype(dtype)
    params["A_log"] = jax.random.uniform(keys[-2], (sizes.heads,))
    params["dt_bias"] = jax.random.uniform(keys[-1], (sizes.heads, sizes.channels), minval=-6.0, maxval=-1.0)
    params["norm"] = jnp.ones((sizes.channels,))
    return params


def empty_cache(sizes: Sizes, slots: int, dtype: Any) -> Cache:
    inputs = jnp.zeros((slots, TAPS - 1, 3 * sizes.heads * sizes.channels), dtype)
    return Cache(inputs, jnp.zeros((slots, sizes.heads, sizes.channels, sizes.channels)))


# ---- the model. How to convolve and how to attend is handed in: prefill, decode and the reference differ in
# that alone.


def model(
    params: Params,
    tokens: jax.Array,
    convolve: Callable[[jax.Array], tuple[jax.Array, Any]],
    attend: Callable[..., tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any, Any]:
    """Tokens [B, T] to logits [B, T, vocabulary], with what `convolve` and `attend` want remembered."""
    heads, (batch, count) = params["A_log"].shape[0], tokens.shape
    residual = params["embedding"][tokens]
    x = rms_norm(residual)
    mixed, inputs = convolve(x @ params["qkv"])
    q, k, v = jnp.split(jax.nn.silu(mixed).reshape(batch, count, 3 * heads, -1), 3, axis=2)
    decay = (x @ params["decay_down"] @ params["decay_up"]).reshape(q.shape)
    gate = jax.nn.sigmoid(x @ params["gate_down"] @ params["gate_up"]).reshape(v.shape)
    o, states = attend(
        q, k, v, decay, x @ params["beta"], A_log=params["A_log"], dt_bias=params["dt_bias"], **KDA_OPTIONS
    )
    o = (rms_norm(o) * params["norm"]).astype(o.dtype) * gate
    y = rms_norm(residual + o.reshape(batch, count, -1) @ params["output"])
    return (y @ params["head"]).astype(jnp.float32), inputs, states


def rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def convolution(taps: jax.Array, windows: jax.Array) -> jax.Array:
    """Windows [..., TAPS, channels] of a token's inputs, its own last."""
    return jnp.sum(windows.astype(jnp.float32) * taps.astype(jnp.float32), axis=-2).astype(windows.dtype)


def at_slots(slots: jax.Array, pool: jax.Array) -> jax.Array:
    """Slots as JAX's out-of-bounds modes want them: an empty place is past the end."""
    return jnp.where(slots < 0, pool.shape[0], slots)


# ---- serving


def prefill(
    params: Params, tokens: jax.Array, cu_seqlens: jax.Array, slots: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Packed prompts [1, T] to each one's next token [N], and the pools with their slots filled."""
    last = cu_seqlens[1:] - 1  # of each prompt
    position = jnp.arange(tokens.shape[1])
    sequence = jnp.searchsorted(cu_seqlens, position, side="right") - 1
    first = cu_seqlens[sequence]  # the first token of the own prompt

    def windows(x: jax.Array, ends: jax.Array, begins: jax.Array) -> jax.Array:
        """The TAPS rows of x [T, channels] up to each of `ends`, with zeros before `begins`."""
        rows = ends[:, None] + jnp.arange(1 - TAPS, 1)
        return jnp.where((rows >= begins[:, None])[..., None], x[jnp.maximum(rows, 0)], 0)

    def convolve(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = windows(x[0], last, cu_seqlens[:-1])[:, 1:]
        return convolution(params["taps"], windows(x[0], position, first))[None], inputs

    places = at_slots(slots, cache.states)
    zeros = jnp.zeros_like(cache.states[: slots.shape[0]])
    attend = functools.partial(
        jax_kda.kda_prefill,
        initial_state=cache.states.at[places].set(
            zeros, mode="drop"
        ),  # a slot may have served another sequence
        state_indices=slots,
        cu_seqlens=cu_seqlens,
    )
    logits, inputs, states = model(params, tokens, convolve, attend)
    return greedy(logits[0, last]), Cache(cache.inputs.at[places].set(inputs, mode="drop"), states)


def decode(
    params: Params, tokens: jax.Array, slots: jax.Array, cache: Cache, steps: int
) -> tuple[tuple[jax.Array, jax.Array], Cache]:
    """From each sequence's latest token [N]: the next ones [steps, N] with their logits, and the pools."""

    def step(carry: tuple[jax.Array, Cache], _: None) -> Any:
        tokens, cache = carry
        places = at_slots(slots, cache.inputs)

        def convolve(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            window = jnp.concatenate([cache.inputs.at[places].get(mode="fill", fill_value=0), x], axis=1)
            return convolution(params["taps"], window)[:, None], window[:, 1:]

        attend = functools.partial(jax_kda.kda_decode, initial_state=cache.states, state_indices=slots)
        logits, inputs, states = model(params, tokens[:, None], convolve, attend)
        following = greedy(logits[:, 0])
        cache = Cache(cache.inputs.at[places].set(inputs, mode="drop"), states)
        return (following, cache), (following, logits[:, 0])

    (_, cache), results = jax.lax.scan(step, (tokens, cache), None, length=steps)
    return results, cache


def greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def reference(params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [1, T, vocabulary] of one whole sequence [1, T], with nothing cached and KDA token by token."""

    def convolve(x: jax.Array) -> tuple[jax.Array, None]:
        rows = jnp.arange(x.shape[1])[:, None] + jnp.arange(TAPS)
        return convolution(params["taps"], jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))[:, rows]), None

    return model(params, tokens, convolve, jax_kda.kda_reference)[0]


class Served(NamedTuple):
    prompts: list[np.ndarray]
    tokens: np.ndarray  # [steps + 1, N]: what followed each prompt
    errors: list[float]  # of each sequence's logits in decoding, relative to the reference
    cache: Cache


def serve(
    sizes: Sizes,
    lengths: Sequence[int],
    steps: int,
    dtype: Any,
    slots: Sequence[int],
    pool: int,
    seed: int = 0,
) -> Served:
    """Prompts of these lengths into these slots of a pool, `steps` tokens decoded, and everything judged."""
    params = make_params(sizes, dtype, seed)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, sizes.vocabulary, n, dtype=np.int32) for n in lengths]
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    places = np.array(slots, np.int32)
    progress = tqdm(total=2 + len(prompts), desc="prefill", unit="step", leave=False)
    with progress:
        cache = empty_cache(sizes, pool, dtype)
        first, cache = jax.jit(prefill, donate_argnums=4)(
            params, np.concatenate(prompts)[None], cu_seqlens, places, cache
        )
        jax.block_until_ready(first)
        progress.update()
        progress.set_description(f"decode {steps} tokens")
        loop = jax.jit(decode, static_argnums=4, donate_argnums=3)
        (following, logits), cache = loop(params, first, places, cache, steps)
        tokens = np.concatenate([np.asarray(first)[None], following])
        progress.update()
        errors = []
        for n, prompt in enumerate(prompts):
            progress.set_description(f"judge sequence {n}")
            whole = np.concatenate([prompt, tokens[:-1, n]])[None]
            wanted = np.asarray(jax.jit(reference)(params, whole))[0, len(prompt) :]
            got = np.asarray(logits)[:, n]
            errors.append(float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)))
            progress.update()
    return Served(prompts, tokens, errors, cache)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode (64)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    lengths, slots = (37, 5, 130, 1), (6, 0, 3, 2)
    served = serve(Sizes(), lengths, options.steps, jnp.dtype(options.dtype), slots, pool=8)
    # Logits pass two roundings to bfloat16 on either side; in float32 only the order of the sums differs.
    bar = 2e-2 if options.dtype == "bfloat16" else 1e-4
    print(f"{'slot':>4} {'prompt':>6} {'decoded':>7}  {'first tokens':<24} error")
    for n, length in enumerate(lengths):
        start = " ".join(str(token) for token in served.tokens[:5, n])
        print(f"{slots[n]:>4} {length:>6} {options.steps:>7}  {start:<24} {served.errors[n]:.1e}")
    right = max(served.errors) <= bar
    print(f"logits against the token recurrence: {'right' if right else 'WRONG'} (at most {bar:.0e})")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
