"""Kimi Delta Attention prefill in chunk form, in plain JAX.

This is the lowering for every platform but CUDA, the lowering on CUDA of what no kernel serves, and what the
derivative is taken of. C tokens at a time; per chunk and value head, with G the inclusive cumulative log
decay (Kimi Linear, arXiv:2510.26692, section 3; beta stays with its rows, outside the inverse):

    Kd = k exp(G)   Qd = scale q exp(G)   Kr = k exp(G_C - G)   a = exp(G_C)
    L  = strictly lower, beta_i sum_d k_id k_jd exp(G_id - G_jd)      A = (I + L)^-1
    M  = lower,          scale  sum_d q_id k_jd exp(G_id - G_jd)
    U  = A (beta (V - Kd S))   O = Qd S + M U   S <- diag(a) S + Kr^T U

How the pair weights exp(G_i - G_j) and the inverse are made decides whether this is right. Both are built by
doubling: two neighbouring blocks of h tokens become one of 2h. Between them,

    exp(G_i - G_j) = (decay in the later block up to and with i) * (decay after j in the earlier block)

and both factors are *products* of decays inside one block, never exp of a difference of long sums. So no
factor exceeds 1, nothing is lost when a channel has decayed by thousands, there is nothing to mask before
`exp` (gradients are finite), and a token never meets anything that depends on a later one. Where the gate
bounds the decay of a token, blocks of BLOCK tokens are made at once instead, from the decay since the block's
start and its reciprocal, which the bound keeps below exp(40). The inverse doubles along,

    [I + L1   0   ]^-1    [ T1          0  ]
    [ B     I + L2]     = [-T2 B T1     T2 ]

which is forward substitution by blocks: no power of L is ever formed. Everything is float32 at precision
HIGHEST.

What is fast on a CPU decides the rest. XLA computes an operand anew in each of its consumers, unless a
barrier keeps it. A product takes whole arrays, so a slice of one costs a copy, unless something is multiplied
on the way. Few large products use more of a core, and more cores, than many small ones. What does not depend
on each other runs at the same time, so that the chunks of one group are prepared while the recurrence goes
through those of the group before; a branch would hold up both, so there is one a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kda import activations
from jax_kda.contract import GateMode, Options

__all__ = ["chunked_prefill"]

CHUNK = 64  # tokens; a power of two
BLOCK = 8  # tokens; a power of two. Smaller blocks of a chunk are never sliced out, only masked
LARGEST_EXPONENT = 40.0  # of a reciprocal decay: its square, which the gradient takes, is still a float32
TOKEN_OPERANDS = ("q", "k", "v", "g", "beta")
GROUP = 4  # chunks prepared together, at most
SPAN = 8  # chunks recomputed together in the backward pass, at most


def chunked_prefill(options: Options, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the primitive's operands that `options.result_names` names.

    o is [B, T, HV, V] in v's dtype; final_state [B, N, HV, K, V] and checkpoints [B, T // n, HV, K, V] (V, K
    with `state_v_first`) in `options.state_dtype`. Memory is linear in T, under reverse-mode differentiation
    too.
    """
    named = dict(zip(options.operand_names, operands, strict=True))
    v, K = named["v"], named["q"].shape[3]
    B, T, HV, V = v.shape
    N = named["offsets"].shape[1] - 1 if options.packed else 1

    initial = named.pop("initial_state", None)
    if initial is None:
        initial = jnp.zeros((B, N, HV, K, V), options.state_dtype)
    elif options.state_v_first:
        initial = initial.swapaxes(-1, -2)

    if isinstance(T, int) and T == 0:
        o, final, states = v, initial, jnp.zeros((B, 0, HV, K, V), jnp.float32)
    else:
        # Shapes and dtypes are combined in NumPy's way here, however strict the caller is with his own.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            o, final, states = (_run_packed if options.packed else _run_dense)(options, named, initial)
    wanted = {"final_state": final, "checkpoints": states}
    return o.astype(v.dtype), *(
        (x.swapaxes(-1, -2) if options.state_v_first else x).astype(options.state_dtype)
        for x in (wanted[name] for name in options.result_names[1:])
    )


# From here on the batch is folded into the heads: `heads` is B * HV, or B * H for q and k. Every head has its
# own gate and state anyway, and without an axis of size 1 XLA scans a single row where it lies instead of
# copying it first.


class _Norm(NamedTuple):
    """x * scale * reciprocal is x normalised; [..., C, heads, 1]."""

    scale: jax.Array  # a power of two, against overflow
    reciprocal: jax.Array


class _Chunk(NamedTuple):
    """The tokens of one chunk, as they come; leading axes number chunks."""

    q: jax.Array  # [..., C, B * H, K], like k
    k: jax.Array
    v: jax.Array  # [..., C, heads, V]
    g: jax.Array  # [..., C, heads, K]
    beta: jax.Array  # [..., C, heads]
    valid: jax.Array  # [..., C, heads or 1]: a token stands here
    is_first: jax.Array | None = (
        None  # [..., heads or 1]: a packed sequence begins here; None where none are packed
    )
    start: jax.Array | None = None  # [..., heads, K, V]: the state it begins from; None is zeros


class _Prepared(NamedTuple):
    """What a chunk's recurrence needs, by the table of the module's docstring. Leading axes end in heads; a
    chunk is n blocks of b tokens.

    Kd, Qd and Kr are left as two factors, to be multiplied chunk by chunk: then taking one chunk out costs
    nothing.
    """

    k_q: jax.Array  # [..., n, 2, b, K]: Kd and Qd but for `before`; one product with the state serves both
    k: jax.Array  # [..., n, b, K]: Kr but for `after`
    before: jax.Array  # [..., n, K]: decay of the chunk before this block
    after: jax.Array  # [..., n, K]: and after it
    a: jax.Array  # [..., K]
    beta: jax.Array  # [..., C]
    A: jax.Array  # [..., C, C]
    M: jax.Array  # [..., C, C]


class _Below(NamedTuple):
    """L, the strictly lower triangular, by blocks as they double."""

    blocks: jax.Array  # [..., n, b, b]: within the smallest
    between: tuple[jax.Array, ...]  # each [..., n, h, h]: the second of two blocks of h tokens to the first


class _Tokens(NamedTuple):
    """A chunk's tokens ready for the recurrence: float32."""

    q: jax.Array  # [..., heads, C, K], like k and g
    k: jax.Array
    g: jax.Array
    beta: jax.Array  # [..., heads, C]
    sum_g: jax.Array  # [..., heads, K]


class _Layout(NamedTuple):
    """Which tokens stand where in one packed row. A sequence takes whole chunks, in order; an empty one takes
    none.
    """

    token: jax.Array  # [chunks * C]: the token at this place; T where there is none
    place: jax.Array  # [T]: the place of this token; chunks * C where it belongs to no sequence
    sequence: jax.Array  # [chunks]: N where the chunk is not used
    is_first: jax.Array  # [chunks]: the sequence begins here
    last_chunk: jax.Array  # [N]: of this sequence; `chunks` where the sequence is empty
    checkpoints: jax.Array  # [T // n]: the chunk whose end this checkpoint is; `chunks` where there is none


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """[..., i, d] and [..., d, j] to [..., i, j]."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _dot_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """[..., i, d] and [..., j, d] to [..., i, j]."""
    return jnp.einsum("...id,...jd->...ij", x, y, precision=lax.Precision.HIGHEST)


def _causal_dot(lower: jax.Array, x: jax.Array) -> jax.Array:
    """`lower @ x`; lower is triangular, [..., C, C], and x is [..., C, V].

    Row i sees rows 0..i of x and no other, even where later rows are not finite: zero times infinity would
    carry an overflow, or a NaN, back to tokens before it. Where all is finite, these are the bits of `_dot`.
    """
    finite = jnp.isfinite(x)
    product = _dot(lower, jnp.where(finite, x, 0.0))
    # The sum of 4^-i over the bad rows i reaches 4^-n exactly where one of rows 0..n is bad. (A sum, since
    # XLA's other reductions are several times slower on a CPU. 4^-63, for C = 64, is still a normal number.)
    C = x.shape[-2]
    weight = 4.0 ** -jnp.arange(C, dtype=jnp.float32)[:, None]
    bad = jnp.sum(jnp.where(finite, 0.0, weight), axis=-2, keepdims=True)
    return jnp.where(bad >= weight, jnp.nan, product)


def _inverse(dot: Callable[[jax.Array, jax.Array], jax.Array], L: _Below) -> jax.Array:
    """(I + L)^-1 [..., C, C], by doubling. `dot` multiplies by what is triangular."""
    b = L.blocks.shape[-1]
    A = jnp.eye(b, dtype=L.blocks.dtype) - jnp.where(_across(b, 1), L.blocks, 0.0)
    h = 2
    while h < b:
        A = A - dot(A, dot(jnp.where(_across(b, h), L.blocks, 0.0), A))
        h *= 2
    for B in L.between:
        A1, A2 = _halves(A)
        A = _two_by_two(A1, jnp.zeros_like(A1), -dot(A2, _dot(B, A1)), A2)
    return A[..., 0, :, :]


def _prepare(scale: float, bounded: bool, tokens: _Tokens) -> tuple[_Prepared, _Below]:
    """The chunk's matrices, and what A is the inverse of. `bounded`: BLOCK tokens decay by LARGEST_EXPONENT
    at most."""
    *lead, C, K = tokens.k.shape
    b = min(BLOCK, C)

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(*lead, C // b, b, x.shape[-1])

    k, decay, beta = blocks(tokens.k), blocks(jnp.exp(tokens.g)), blocks(tokens.beta[..., None])
    k_q = jnp.stack([k, blocks(tokens.q * scale)], axis=-3)
    whole, k, k_q, pairs = (_blocks_at_once if bounded else _blocks_doubled)(decay, k, k_q)

    place = jnp.arange(b)
    L = jnp.where(place[:, None] > place, beta * pairs[..., 0, :, :], 0.0)
    M = jnp.where(place[:, None] >= place, pairs[..., 1, :, :], 0.0)
    between = []

    # From here on, of blocks of h tokens: the decay of a whole one; and for each of the first blocks inside,
    # the decay of the larger one before it and after it.
    before = after = jnp.ones_like(whole)
    h = b
    while h < C:
        n = C // (2 * h)

        later = _halves((k_q * before[..., None, None, :]).reshape(*lead, 2 * n, h * 2, K))[1]
        earlier = _halves((k * after[..., None, :]).reshape(*lead, 2 * n, h, K))[0]
        pairs = _dot_rows(later, earlier).reshape(*lead, n, h // b, 2, b, h)
        L21, M21 = (pairs[..., i, :, :].reshape(*lead, n, h, h) for i in (0, 1))
        between.append(_halves(tokens.beta.reshape(*lead, 2 * n, h, 1))[1] * L21)
        M1, M2 = _halves(M)
        M = _two_by_two(M1, jnp.zeros_like(M1), M21, M2)

        first, second = (x[..., None, :, :] for x in _halves(whole[..., None, :]))
        one = jnp.ones_like(first)
        inner = (*lead, n, 2, h // b, K)
        before = (before.reshape(inner) * jnp.concatenate([one, first], axis=-3)).reshape(*lead, C // b, K)
        after = (after.reshape(inner) * jnp.concatenate([second, one], axis=-3)).reshape(*lead, C // b, K)
        whole = (first * second)[..., 0, 0, :]
        h *= 2

    # From the sum: a slow channel's decay rounds to the same side at every token, which thousands would show.
    a = jnp.exp(tokens.sum_g)
    below = _Below(L, tuple(between))
    A = _inverse(_dot, below)
    return _Prepared(k_q, k, before, after, a, tokens.beta, A, M[..., 0, :, :]), below


def _blocks_at_once(decay: jax.Array, k: jax.Array, k_q: jax.Array) -> tuple[jax.Array, ...]:
    """decay and k [..., b, K], k_q [..., 2, b, K] to, of each block of b tokens: its decay [..., K]; k times
    the decay from after each token to the end; k_q times the decay from the start through each token; and
    [..., 2, b, b], k_q by k with the decay between them, which holds where the row is not before the column.
    """
    *lead, b, K = k.shape
    into = decay
    h = 1
    while h < b:
        into = _with_neighbour(into, into, h)[0]
        h *= 2
    into = lax.optimization_barrier(into)
    whole = into[..., -1, :]
    k = lax.optimization_barrier(k / into)
    k_q = lax.optimization_barrier(k_q * into[..., None, :, :])
    pairs = _dot_rows(k_q.reshape(*lead, 2 * b, K), k).reshape(*lead, 2, b, b)
    return whole, lax.optimization_barrier(k * whole[..., None, :]), k_q, pairs


def _blocks_doubled(decay: jax.Array, k: jax.Array, k_q: jax.Array) -> tuple[jax.Array, ...]:
    """The same where decays have no bound."""
    *lead, b, K = k.shape

    def dot(k_q: jax.Array, k: jax.Array) -> jax.Array:
        return _dot_rows(k_q.reshape(*lead, 2 * b, K), k).reshape(*lead, 2, b, b)

    pairs = dot(k_q, k)  # of a token with itself
    into, out = decay, jnp.ones_like(decay)
    h = 1
    while h < b:
        pairs = jnp.where(_across(b, h), dot(k_q * into[..., None, :, :], k * out), pairs)
        into, out = lax.optimization_barrier(_with_neighbour(into, out, h))
        h *= 2
    k, k_q = lax.optimization_barrier((k * out, k_q * into[..., None, :, :]))
    return into[..., -1, :], k, k_q, pairs


def _with_neighbour(into: jax.Array, out: jax.Array, h: int) -> tuple[jax.Array, jax.Array]:
    """The decays into and out of blocks of h tokens to those of 2h; [..., tokens, K]."""
    *lead, b, K = into.shape
    x, y = (z.reshape(*lead, b // (2 * h), 2, h, K) for z in (into, out))
    first, second = x[..., :1, -1:, :], x[..., 1:, -1:, :]
    is_second = jnp.arange(2)[:, None, None] == 1
    x, y = x * jnp.where(is_second, first, 1.0), y * jnp.where(is_second, 1.0, second)
    return x.reshape(into.shape), y.reshape(into.shape)


def _across(b: int, h: int) -> jax.Array:
    """[b, b], for blocks of h tokens two and two: the row in the second, the column in the first."""
    block = jnp.arange(b) // h
    return (block[:, None] == block + 1) & (block % 2 == 0)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks [..., 2 n, rows, columns] to the first and the second of each two, [..., n, rows, columns]."""
    *lead, n, i, j = x.shape
    pairs = x.reshape(*lead, n // 2, 2, i, j)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _two_by_two(x11: jax.Array, x12: jax.Array, x21: jax.Array, x22: jax.Array) -> jax.Array:
    top = jnp.concatenate([x11, x12], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([x21, x22], axis=-1)], axis=-2)


def _step(state: jax.Array, prepared: _Prepared, v: jax.Array) -> tuple[jax.Array, ...]:
    """One chunk: state [heads, K, V] and v [C, heads, V] to the next state, and Qd S and beta (V - Kd S)
    and U [heads, C, V].

    A token that is not finite spoils its columns of U from the first row on. Of the next state that is no
    more than such a token must spoil; `_careful_product` puts the outputs of the tokens before it right.
    """
    v = v.astype(state.dtype).swapaxes(0, 1)
    heads, C, V = v.shape
    n, _, b, K = prepared.k_q.shape[1:]
    Kd_Qd = (prepared.k_q * prepared.before[:, :, None, None]).reshape(heads, 2 * C, K)
    Kr = (prepared.k * prepared.after[:, :, None]).reshape(heads, C, K)
    read = _dot(Kd_Qd, state).reshape(heads, n, 2, b, V)
    read_k, read_q = (read[:, :, i].reshape(heads, C, V) for i in (0, 1))
    write = prepared.beta[..., None] * (v - read_k)
    U = _dot(prepared.A, write)
    state = prepared.a[..., None] * state + _dot(Kr.swapaxes(1, 2), U)
    return state, read_q, write, U


def _careful_product(below: _Below, M: jax.Array, writes: list[jax.Array]) -> jax.Array:
    """M U of a span again, [span, heads, C, V], where no token sees a later one that is not finite."""
    A = _inverse(_causal_dot, below)
    return _causal_dot(M, jnp.stack([_causal_dot(A[i], write) for i, write in enumerate(writes)]))


def _activate(
    options: Options,
    chunks: _Chunk,
    norms: tuple[_Norm, _Norm] | None,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
) -> _Tokens:
    q, k = chunks.q.astype(jnp.float32), chunks.k.astype(jnp.float32)
    if norms is not None:
        q, k = (x * norm.scale * norm.reciprocal for x, norm in zip((q, k), norms, strict=True))
    g = activations.log_decay(options, chunks.g, A_log, dt_bias, jnp.float32)
    beta = activations.write_strength(options, chunks.beta, jnp.float32)
    # A place without a token must leave the state alone: decay 1, nothing written.
    g = jnp.where(chunks.valid[..., None], g, 0.0)
    beta = jnp.where(chunks.valid, beta, 0.0)
    group = g.shape[-2] // q.shape[-2]
    q, k = (jnp.repeat(x, group, axis=-2) for x in (q, k))
    g = lax.optimization_barrier(g)  # or its sum and its exponential would each make the sigmoid anew
    sum_g = g.sum(axis=-3)
    q, k, g = (x.swapaxes(-2, -3) for x in (q, k, g))
    return _Tokens(q, k, g, beta.swapaxes(-1, -2), sum_g)


def _norm(x: jax.Array) -> _Norm:
    """What `activations.l2_normalise` multiplies by, but its second sum, for squares that overflow, is left
    out where there are none. Once for all chunks, as XLA then sums x where it lies.
    """
    x = x.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    is_large = squares > 2.0**80
    scale = jnp.where(is_large, 2.0**-100, 1.0)
    plain = lax.rsqrt(squares + activations.L2_EPSILON)

    def any_size(x: jax.Array, plain: jax.Array) -> jax.Array:
        small = x * 2.0**-100
        small_squares = jnp.sum(small * small, axis=-1, keepdims=True)
        # The unused branch must be harmless too, or the gradient of the zero row is NaN.
        return jnp.where(is_large, lax.rsqrt(jnp.where(is_large, small_squares, 1.0)), plain)

    return _Norm(scale, lax.cond(is_large.any(), any_size, lambda x, plain: plain, x, plain))


def _scan_chunks(
    options: Options, named: dict[str, jax.Array], chunks: _Chunk, state: jax.Array, keep_states: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """All chunks in order, leading axes [spans, span]: the last state, o [spans, span, C, heads, V], and, if
    `keep_states`, the state after every chunk.
    """
    B, _, HV, _ = named["v"].shape
    A_log, dt_bias = (
        None if x is None else jnp.broadcast_to(x, (B, *x.shape[1:])).reshape(1, B * HV, *x.shape[2:])
        for x in (named.get("A_log"), named.get("dt_bias"))
    )

    def group(
        state: jax.Array, chunks: _Chunk, norms: tuple[_Norm, _Norm] | None
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Chunks prepared together: the last state, o [chunks, C, heads, V], and the state after each."""
        tokens = _activate(options, chunks, norms, A_log, dt_bias)
        prepared, below = _prepare(options.scale, bounded, tokens)
        steps = []
        # Unrolled, so that a chunk's products take its part of the group's arrays where it lies.
        for i in range(chunks.v.shape[0]):
            own, v, is_first, start = jax.tree.map(
                lambda x, i=i: x[i], (prepared, chunks.v, chunks.is_first, chunks.start)
            )
            if is_first is not None:
                begin = 0.0 if start is None else start.astype(state.dtype)
                state = jnp.where(is_first[:, None, None], begin, state)
            state, read, write, U = _step(state, own, v)
            steps.append((read, write, U, state))
        reads, writes, Us, states = (list(x) for x in zip(*steps, strict=True))
        product = _dot(prepared.M, jnp.stack(Us))
        # Zero times what is not finite is NaN, and the first row of M has zeros for all rows of U but the
        # first, as that of A has: it tells whether any token may have been seen too early.
        spoilt = jnp.isnan(product[..., 0, :]).any()
        product = lax.cond(
            spoilt,
            lambda product, *operands: _careful_product(*operands),
            lambda product, *operands: product,
            product, below, prepared.M, writes,
        )  # fmt: skip
        return state, (jnp.stack(reads) + product).swapaxes(1, 2), states

    def span(
        state: jax.Array, operands: tuple[_Chunk, tuple[_Norm, _Norm] | None]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        outputs: list[jax.Array] = []
        states: list[jax.Array] = []
        # A group is prepared while the recurrence goes through the one before.
        length = operands[0].v.shape[0]
        _, size = _evenly(length, GROUP)
        for i in range(0, length, size):
            state, o, own = group(state, *jax.tree.map(lambda x, i=i: x[i : i + size], operands))
            outputs.append(o)
            states += own
        return state, (jnp.concatenate(outputs), jnp.stack(states) if keep_states else None)

    bounded = options.gate == GateMode.SAFE and -options.lower_bound * BLOCK <= LARGEST_EXPONENT
    norms = (_norm(chunks.q), _norm(chunks.k)) if options.l2norm else None
    # Under differentiation only the state between spans is kept; a span is computed again on the way back.
    state, (o, states) = lax.scan(jax.checkpoint(span, prevent_cse=False), state, (chunks, norms))
    return state, o, states


def _run_dense(
    options: Options, named: dict[str, jax.Array], initial: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, the last state, and the checkpoints (none where none are wanted)."""
    B, T, _, V = named["v"].shape
    C = _chunk_size(T)
    spans, span = _evenly(-(-T // C), SPAN)
    places = spans * span * C

    def split(x: jax.Array) -> jax.Array:
        x = _fold(x)
        padded = jnp.concatenate([x, jnp.zeros((places - T, *x.shape[1:]), x.dtype)])
        return padded.reshape(spans, span, C, *x.shape[1:])

    chunks = _Chunk(
        **{name: split(named[name]) for name in TOKEN_OPERANDS},
        valid=(jnp.arange(places, dtype=jnp.int32) < T).reshape(spans, span, C, 1),
    )
    state = initial.reshape(-1, *initial.shape[3:]).astype(jnp.float32) + _zero_that_varies(named)
    every = options.checkpoint_every // C  # chunks
    state, o, states = _scan_chunks(options, named, chunks, state, keep_states=every > 0)
    kept = jnp.zeros((0, *state.shape))
    if states is not None:
        chunk = (jnp.arange(T // options.checkpoint_every) + 1) * every - 1
        kept = states.reshape(-1, *state.shape)[chunk]
    o = _unfold(o.reshape(places, -1, V)[:T], B)
    return o, state.reshape(initial.shape), _unfold(kept, B)


def _run_packed(
    options: Options, named: dict[str, jax.Array], initial: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same of packed sequences."""
    B, T, HV, V = named["v"].shape
    K, N = named["q"].shape[3], named["offsets"].shape[1] - 1
    C = _chunk_size(T)
    # Every sequence may end in a partly filled chunk, so this many are enough for any offsets.
    spans, span = _evenly(-(-T // C) + N, SPAN)
    places = spans * span * C
    every = options.checkpoint_every
    layout = jax.vmap(lambda row: _lay_out(row, T, C, spans * span, every))(named["offsets"])

    def split(x: jax.Array) -> jax.Array:
        # Taken before they are activated, so that a NaN which belongs to no sequence meets nothing, gradients
        # included.
        x = _fold(_take(x, layout.token))
        return x.reshape(spans, span, C, *x.shape[1:])

    def by_chunk(x: jax.Array) -> jax.Array:
        return x.reshape(spans, span, *x.shape[1:])

    def per_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x.T, 1 if isinstance(B, int) and B == 1 else HV, axis=1)

    chunks = _Chunk(
        **{name: split(named[name]) for name in TOKEN_OPERANDS},
        valid=per_head(layout.token < T).reshape(spans, span, C, -1),
        is_first=by_chunk(per_head(layout.is_first)),
        start=by_chunk(_fold(_take(initial, layout.sequence))) if options.has_initial_state else None,
    )
    state = jnp.zeros((B * HV, K, V), jnp.float32) + _zero_that_varies(named)
    keep_states = options.output_final_state or every > 0
    _, o, states = _scan_chunks(options, named, chunks, state, keep_states=keep_states)
    o = _take(_unfold(o.reshape(places, -1, V), B), layout.place)
    if states is None:
        return o, initial, initial[:, :0]
    states = _unfold(states.reshape(spans * span, -1, K, V), B)
    ends = _take(states, layout.last_chunk)
    empty = (layout.last_chunk == spans * span)[:, :, None, None, None]
    ends = jnp.where(empty, initial.astype(ends.dtype), ends)
    return o, ends, _take(states, layout.checkpoints)


def _running(op: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The running `op` of x [n]: jnp.cumsum for jnp.add, lax.cummax for jnp.maximum.

    Not those, since XLA's CPU compiler aborts on them inside the branch that picks the platform in an
    artifact exported for several; nor lax.associative_scan, which takes no symbolic n.
    """
    n = x.shape[0]
    i = jnp.arange(n, dtype=jnp.int32)
    for k in range((n - 1).bit_length() if isinstance(n, int) else 31):
        x = jnp.where(i >= 1 << k, op(x, x[jnp.maximum(i - (1 << k), 0)]), x)
    return x


def _lay_out(offsets: jax.Array, T: int, C: int, chunks: int, every: int) -> _Layout:
    """The layout of one packed row, offsets [N + 1]; any that decrease or leave [0, T] are put right. A
    checkpoint is behind every `every`-th token; 0: none.
    """
    N = offsets.shape[0] - 1
    offsets = _running(jnp.maximum, jnp.clip(offsets.astype(jnp.int32), 0, T))
    begins, ends = offsets[:-1], offsets[1:]
    counts = -(-(ends - begins) // C)
    after = _running(jnp.add, counts)  # the chunk after each sequence's last
    first = after - counts

    chunk = jnp.arange(chunks, dtype=jnp.int32)
    # How many sequences end at or before this chunk, by counting: searchsorted takes no symbolic N.
    sequence = _running(jnp.add, jnp.zeros(chunks + 1, jnp.int32).at[after].add(1))[:-1]
    of = jnp.minimum(sequence, N - 1)
    inside = jnp.arange(C, dtype=jnp.int32)
    token = (begins[of] + (chunk - first[of]) * C)[:, None] + inside
    token = jnp.where((token < ends[of][:, None]) & (sequence < N)[:, None], token, T).reshape(-1)

    checkpoints = jnp.zeros(0, jnp.int32)
    if every:
        tokens = (chunk - first[of] + 1) * C  # of the sequence, up to the end of this chunk
        is_checkpoint = (sequence < N) & (tokens % every == 0) & (tokens <= (ends - begins)[of])
        number = jnp.where(is_checkpoint, _running(jnp.add, is_checkpoint.astype(jnp.int32)) - 1, T // every)
        checkpoints = jnp.full(T // every, chunks, jnp.int32).at[number].set(chunk, mode="drop")

    places = jnp.arange(chunks * C, dtype=jnp.int32)
    return _Layout(
        token=token,
        place=jnp.full(T, chunks * C, jnp.int32).at[token].set(places, mode="drop"),
        sequence=sequence,
        is_first=(sequence < N) & (chunk == first[of]),
        last_chunk=jnp.where(counts > 0, after - 1, chunks),
        checkpoints=checkpoints,
    )


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, n, ...] and index [B, m] to [B, m, ...]: zeros, and nothing read, where an index is n or more."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=0))(x, index)


def _chunk_size(T: int) -> int:
    """CHUNK, or for a short row the power of two that holds it. T may be symbolic."""
    return min(CHUNK, 1 << (T - 1).bit_length()) if isinstance(T, int) else CHUNK


def _evenly(chunks: int, most: int) -> tuple[int, int]:
    """Parts, and chunks per part, `most` at most, for at least this many chunks, which may be symbolic: equal
    parts, so that little is padded.
    """
    parts = -(-chunks // most)
    return parts, -(-chunks // parts) if isinstance(chunks, int) else most


def _fold(x: jax.Array) -> jax.Array:
    """[B, n, heads, ...] to [n, B * heads, ...]."""
    B, n, heads, *inner = x.shape
    if isinstance(B, int) and B == 1:
        return x.reshape(n, heads, *inner)
    return x.swapaxes(0, 1).reshape(n, B * heads, *inner)


def _unfold(x: jax.Array, B: int) -> jax.Array:
    """[n, B * heads, ...] to [B, n, heads, ...]."""
    n, heads, *inner = x.shape
    return x.reshape(n, B, heads // B, *inner).swapaxes(0, 1)


def _zero_that_varies(named: dict[str, jax.Array]) -> jax.Array:
    """A zero that varies over every mesh axis that any operand varies over.

    Inside shard_map a scan's carry must have one type from first to last, and the carried state ends up
    depending on all operands. The sum of nothing has their axes and none of their values.
    """
    return sum((x.reshape(-1)[:0].astype(jnp.float32).sum() for x in named.values()), jnp.float32(0))
