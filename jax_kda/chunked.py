"""Kimi Delta Attention prefill in chunk form, in plain JAX.

This is the lowering for every platform but CUDA, the lowering on CUDA of what no kernel serves, and what the derivative
is taken of. C tokens at a time; per chunk and value head, with G the inclusive cumulative log decay (Kimi Linear,
arXiv:2510.26692, section 3; names as there):

    Kd = k exp(G)   Qd = scale q exp(G)   Kr = k exp(G_C - G)   a = exp(G_C)
    L  = strictly lower, beta_i sum_d k_id k_jd exp(G_id - G_jd)      A = (I + L)^-1 diag(beta)
    M  = lower,          scale  sum_d q_id k_jd exp(G_id - G_jd)
    U  = A (V - Kd S)    O = Qd S + M U    S <- diag(a) S + Kr^T U

How the pair weights exp(G_i - G_j) and the inverse are made decides whether this is right. Both are built by doubling:
two neighbouring blocks of h tokens become one of 2h. Between them,

    exp(G_i - G_j) = exp(decay from the later block's start through i) * exp(decay after j to the earlier block's end)

and both exponents are *sums* of log decays inside one block, never differences of long cumulative sums. So no factor
exceeds 1, nothing is lost when a channel has decayed by thousands, there is nothing to mask before `exp` (gradients are
finite), and a token never meets anything that depends on a later one. The inverse doubles along,

    [I + L1   0   ]^-1    [ T1          0  ]
    [ B     I + L2]     = [-T2 B T1     T2 ]

which is forward substitution by blocks: no power of L is ever formed. Everything is float32 at precision HIGHEST.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kda import activations
from jax_kda.contract import Options

__all__ = ["chunked_prefill"]

CHUNK = 64  # tokens; a power of two
TOKEN_OPERANDS = ("q", "k", "v", "g", "beta")
SPAN = 8  # chunks prepared together, and recomputed together in the backward pass


def chunked_prefill(options: Options, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """`(o,)` or `(o, final_state)` of the primitive's operands.

    o is [B, T, HV, V] in v's dtype; final_state [B, N, HV, K, V] (V, K with `state_v_first`) in `options.state_dtype`.
    Memory is linear in T, under reverse-mode differentiation too.
    """
    named = dict(zip(options.operand_names, operands, strict=True))
    v = named["v"]
    B, T, HV, V = v.shape
    K = named["q"].shape[3]
    offsets = named.get("offsets")
    sequences = 1 if offsets is None else offsets.shape[1] - 1

    initial = named.get("initial_state")
    if initial is None:
        initial = jnp.zeros((B, sequences, HV, K, V), options.state_dtype)
    elif options.state_v_first:
        initial = initial.swapaxes(-1, -2)

    if isinstance(T, int) and T == 0:
        o, final = v, initial
    else:
        run = _run_dense if offsets is None else _run_packed
        o, final = run(options, named, initial)
    if not options.output_final_state:
        return (o.astype(v.dtype),)
    if options.state_v_first:
        final = final.swapaxes(-1, -2)
    return o.astype(v.dtype), final.astype(options.state_dtype)


class _Chunk(NamedTuple):
    """One chunk, activated, float32, heads before tokens: [..., B, heads, C, size]; leading axes number chunks."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array  # log decay; 0 where no token stands
    beta: jax.Array  # write strength; 0 where no token stands
    is_first: jax.Array | None = None  # [..., B]: a packed sequence begins here; None where rows are not packed
    start: jax.Array | None = None  # [..., B, HV, K, V]: the state it begins from; None is zeros


class _Prepared(NamedTuple):
    """What a chunk's recurrence needs, [..., HV, C, *]: the table of the module's docstring."""

    Kd_Qd: jax.Array  # [..., 2C, K]: one product with the state serves both
    Kr: jax.Array  # [..., C, K]
    a: jax.Array  # [..., K]
    A: jax.Array  # [..., C, C]
    M: jax.Array  # [..., C, C]


class _Layout(NamedTuple):
    """Which tokens stand where in one packed row. A sequence takes whole chunks, in order; an empty one takes none."""

    token: jax.Array  # [chunks * C]: the token at this place; T where there is none
    place: jax.Array  # [T]: the place of this token; chunks * C where it belongs to no sequence
    sequence: jax.Array  # [chunks]: N where the chunk is not used
    is_first: jax.Array  # [chunks]: the sequence begins here
    last_chunk: jax.Array  # [N]: of this sequence; `chunks` where the sequence is empty


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _causal_dot(lower: jax.Array, x: jax.Array) -> jax.Array:
    """`lower @ x` for a lower-triangular matrix, where row i sees rows 0..i of x even if later rows are not finite.

    Zero times infinity would carry an overflow, or a NaN, back to tokens before it.
    """
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    finite = jnp.isfinite(x)
    first_bad = jnp.min(jnp.where(finite, x.shape[-2], row), axis=-2, keepdims=True)
    return jnp.where(row >= first_bad, jnp.nan, _dot(lower, jnp.where(finite, x, 0.0)))


def _prepare(scale: float, q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array) -> _Prepared:
    """q, k, g [..., C, K] and beta [..., C] to the chunk's matrices, doubling from single tokens (module docstring)."""
    *lead, C, K = k.shape
    beta = beta[..., None]
    q = q * scale

    # Per block of h tokens: the decay from its start through each token, and from after each token to its end.
    into = jnp.exp(g)[..., None, :]
    out = jnp.ones_like(into)
    inverse = jnp.ones((*lead, C, 1, 1), k.dtype)
    M = jnp.sum(q * k, axis=-1)[..., None, None]

    def halves(x: jax.Array, h: int) -> tuple[jax.Array, jax.Array]:
        pairs = x.reshape(*lead, C // (2 * h), 2, h, x.shape[-1])
        return pairs[..., 0, :, :], pairs[..., 1, :, :]

    h = 1
    while h < C:
        into1, into2 = halves(into, h)
        out1, out2 = halves(out, h)
        k1, k2 = halves(k, h)
        _, q2 = halves(q, h)
        _, beta2 = halves(beta, h)
        T1, T2 = halves(inverse, h)
        M1, M2 = halves(M, h)

        later = jnp.concatenate([beta2 * k2 * into2, q2 * into2], axis=-2)
        between = _dot(later, (k1 * out1).swapaxes(-1, -2))
        corner = -_causal_dot(T2, _dot(between[..., :h, :], T1))
        zeros = jnp.zeros_like(T1)
        inverse = _two_by_two(T1, zeros, corner, T2)
        M = _two_by_two(M1, zeros, between[..., h:, :], M2)

        total1, total2 = into1[..., -1:, :], into2[..., -1:, :]
        into = jnp.concatenate([into1, total1 * into2], axis=-2)
        out = jnp.concatenate([out1 * total2, out2], axis=-2)
        h *= 2

    into, out, inverse, M = (x.reshape(*lead, C, x.shape[-1]) for x in (into, out, inverse, M))
    return _Prepared(
        Kd_Qd=jnp.concatenate([k * into, q * into], axis=-2),
        Kr=k * out,
        # From the sum: a slow channel's decay rounds to the same side at every token, and over thousands it would show.
        a=jnp.exp(jnp.sum(g, axis=-2)),
        A=inverse * beta.swapaxes(-1, -2),
        M=M,
    )


def _two_by_two(x11: jax.Array, x12: jax.Array, x21: jax.Array, x22: jax.Array) -> jax.Array:
    top = jnp.concatenate([x11, x12], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([x21, x22], axis=-1)], axis=-2)


def _step(state: jax.Array, prepared: _Prepared, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One chunk: state [B, HV, K, V] and v [B, HV, C, V] to the next state and o [B, HV, C, V]."""
    C = v.shape[-2]
    read = _dot(prepared.Kd_Qd, state)
    U = _causal_dot(prepared.A, v - read[..., :C, :])
    o = read[..., C:, :] + _causal_dot(prepared.M, U)
    state = prepared.a[..., None] * state + _dot(prepared.Kr.swapaxes(-1, -2), U)
    return state, o


def _scan_chunks(
    scale: float, chunks: _Chunk, state: jax.Array, keep_states: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """All chunks in order, leading axes [spans, span]: the last state, o [spans, span, B, C, HV, V], and, if
    `keep_states`, the state after every chunk."""

    def chunk(
        state: jax.Array, operands: tuple[_Prepared, jax.Array, jax.Array | None, jax.Array | None]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        prepared, v, is_first, start = operands
        if is_first is not None:
            begin = 0.0 if start is None else start.astype(state.dtype)
            state = jnp.where(is_first[:, None, None, None], begin, state)
        state, o = _step(state, prepared, v)
        return state, (o.swapaxes(-2, -3), state if keep_states else None)

    def span(state: jax.Array, chunks: _Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        group = chunks.v.shape[-3] // chunks.q.shape[-3]
        q, k = (jnp.repeat(x, group, axis=-3) for x in (chunks.q, chunks.k))
        prepared = _prepare(scale, q, k, chunks.g, chunks.beta)
        return lax.scan(chunk, state, (prepared, chunks.v, chunks.is_first, chunks.start))

    # Under differentiation only the state between spans is kept; a span is computed again on the way back.
    state, (o, states) = lax.scan(jax.checkpoint(span, prevent_cse=False), state, chunks)
    return state, o, states


def _activate(options: Options, rows: dict[str, jax.Array], valid: jax.Array) -> Iterator[jax.Array]:
    """q, k, v, g, beta [B, places, ...] ready for the recurrence, float32; valid [B or 1, places]."""
    q, k, v = (rows[name].astype(jnp.float32) for name in ("q", "k", "v"))
    if options.l2norm:
        q, k = activations.l2_normalise(q), activations.l2_normalise(k)
    g = activations.log_decay(options, rows["g"], rows.get("A_log"), rows.get("dt_bias"), jnp.float32)
    beta = activations.write_strength(options, rows["beta"], jnp.float32)
    # A place without a token must leave the state alone: decay 1, nothing written.
    yield from (q, k, v, jnp.where(valid[..., None, None], g, 0.0), jnp.where(valid[..., None], beta, 0.0))


def _run_dense(
    options: Options, named: dict[str, jax.Array], initial: jax.Array
) -> tuple[jax.Array, jax.Array]:
    T = named["v"].shape[1]
    C = _chunk_size(T)
    spans, span = _spans(-(-T // C))
    places = spans * span * C

    def pad(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.zeros((x.shape[0], places - T, *x.shape[2:]), x.dtype)], axis=1)

    rows = named | {name: pad(named[name]) for name in TOKEN_OPERANDS}
    valid = jnp.arange(places, dtype=jnp.int32)[None] < T
    chunks = _Chunk(*(_to_chunks(x, spans, span, C) for x in _activate(options, rows, valid)))
    state = initial[:, 0].astype(jnp.float32) + _zero_that_varies(named)
    state, o, _ = _scan_chunks(options.scale, chunks, state, keep_states=False)
    return _from_chunks(o)[:, :T], state[:, None]


def _run_packed(
    options: Options, named: dict[str, jax.Array], initial: jax.Array
) -> tuple[jax.Array, jax.Array]:
    B, T, HV, V = named["v"].shape
    K, N = named["q"].shape[3], named["offsets"].shape[1] - 1
    C = _chunk_size(T)
    # Every sequence may end in a partly filled chunk, so this many are enough for any offsets.
    spans, span = _spans(-(-T // C) + N)
    layout = jax.vmap(lambda row: _lay_out(row, T, C, spans * span))(named["offsets"])

    # Taken before they are activated, so that a NaN which belongs to no sequence meets nothing, gradients included.
    rows = named | {name: _take(named[name], layout.token) for name in TOKEN_OPERANDS}
    activated = _activate(options, rows, layout.token < T)
    chunks = _Chunk(
        *(_to_chunks(x, spans, span, C) for x in activated),
        is_first=_by_chunk(layout.is_first, spans, span),
        start=_by_chunk(_take(initial, layout.sequence), spans, span) if options.has_initial_state else None,
    )
    state = jnp.zeros((B, HV, K, V), jnp.float32) + _zero_that_varies(named)
    _, o, states = _scan_chunks(options.scale, chunks, state, keep_states=options.output_final_state)
    o = _take(_from_chunks(o), layout.place)
    if states is None:
        return o, initial
    ends = _take(_from_chunks(states[:, :, :, None]), layout.last_chunk)
    empty = (layout.last_chunk == spans * span)[:, :, None, None, None]
    return o, jnp.where(empty, initial.astype(ends.dtype), ends)


def _lay_out(offsets: jax.Array, T: int, C: int, chunks: int) -> _Layout:
    """The layout of one packed row, offsets [N + 1]. Offsets that decrease or leave [0, T] are first made not to."""
    N = offsets.shape[0] - 1
    offsets = lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, T))
    begins, ends = offsets[:-1], offsets[1:]
    counts = -(-(ends - begins) // C)
    after = jnp.cumsum(counts, dtype=jnp.int32)  # the chunk after each sequence's last
    first = after - counts

    chunk = jnp.arange(chunks, dtype=jnp.int32)
    sequence = jnp.searchsorted(after, chunk, side="right").astype(jnp.int32)
    of = jnp.minimum(sequence, N - 1)
    inside = jnp.arange(C, dtype=jnp.int32)
    token = (begins[of] + (chunk - first[of]) * C)[:, None] + inside
    token = jnp.where((token < ends[of][:, None]) & (sequence < N)[:, None], token, T)

    t = jnp.arange(T, dtype=jnp.int32)
    owner = jnp.searchsorted(offsets, t, side="right").astype(jnp.int32) - 1
    of_token = jnp.clip(owner, 0, N - 1)
    place = first[of_token] * C + t - begins[of_token]
    return _Layout(
        token=token.reshape(-1),
        place=jnp.where((owner >= 0) & (owner < N), place, chunks * C),
        sequence=sequence,
        is_first=(sequence < N) & (chunk == first[of]),
        last_chunk=jnp.where(counts > 0, after - 1, chunks),
    )


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, n, ...] and index [B, m] to [B, m, ...]: zeros, and nothing read, where the index is n or more."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=0))(x, index)


def _chunk_size(T: int) -> int:
    """CHUNK, or for a short row the power of two that holds it. T may be symbolic."""
    return min(CHUNK, 1 << (T - 1).bit_length()) if isinstance(T, int) else CHUNK


def _spans(chunks: int) -> tuple[int, int]:
    """Spans, and chunks per span, for at least this many chunks: equal spans, so that little is padded."""
    spans = -(-chunks // SPAN)
    return spans, -(-chunks // spans) if isinstance(chunks, int) else SPAN


def _to_chunks(x: jax.Array, spans: int, span: int, C: int) -> jax.Array:
    """[B, spans * span * C, heads, ...] to [spans, span, B, heads, C, ...]."""
    x = x.reshape(x.shape[0], spans, span, C, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2, 4), (0, 1, 3))


def _by_chunk(x: jax.Array, spans: int, span: int) -> jax.Array:
    """[B, spans * span, ...] to [spans, span, B, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], spans, span, *x.shape[2:]), 0, 2)


def _from_chunks(x: jax.Array) -> jax.Array:
    """[spans, span, B, C, ...] to [B, spans * span * C, ...]."""
    spans, span, B, C = x.shape[:4]
    return jnp.moveaxis(x, 2, 0).reshape(B, spans * span * C, *x.shape[4:])


def _zero_that_varies(named: dict[str, jax.Array]) -> jax.Array:
    """A zero that varies over every mesh axis that any operand varies over.

    Inside shard_map a scan's carry must have one type from first to last, and the carried state ends up depending on
    all operands. The sum of nothing has their axes and none of their values.
    """
    return sum((x.reshape(-1)[:0].astype(jnp.float32).sum() for x in named.values()), jnp.float32(0))
