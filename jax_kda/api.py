"""The public operations: signature, meaning, and one screen of body each."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import contract, ffi, partitioning, pools, routing
from .contract import GateMode, Options
from .decode import decode
from .primitive import prefill

__all__ = ["explain_route", "export_checks", "kda_decode", "kda_prefill"]


@overload
def kda_prefill(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = True,
    cu_seqlens: ArrayLike | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_indices: ArrayLike | None = None,
    checkpoint_every: None = None,
    route: str = "auto",
) -> tuple[jax.Array, jax.Array | None]: ...


@overload
def kda_prefill(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = True,
    cu_seqlens: ArrayLike | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_indices: ArrayLike | None = None,
    checkpoint_every: int,
    route: str = "auto",
) -> tuple[jax.Array, jax.Array | None, jax.Array]: ...


def kda_prefill(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = True,
    cu_seqlens: ArrayLike | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_indices: ArrayLike | None = None,
    checkpoint_every: int | None = None,
    route: str = "auto",
) -> tuple[jax.Array, jax.Array | None] | tuple[jax.Array, jax.Array | None, jax.Array]:
    r"""Kimi Delta Attention over whole sequences: the gated delta rule with a decay per key channel.

    Per sequence and value head a state `S[K, V]` (float32) goes through the tokens in order::

        S <- exp(g_t)[:, None] * S               decay, one per key channel
        S <- S + k_t (beta_t (v_t - S^T k_t))^T  the delta rule
        o_t = scale * S^T q_t                    read

    The argument names are those of flash-linear-attention's `chunk_kda`, and calls written for it carry over,
    but for three things: the final state is returned unless `output_final_state=False`; everything after
    `beta` goes by keyword; and arguments that would be ignored are refused.

    Args:
        q, k: `[B, T, H, K]`, bfloat16, float16 or float32. Any K.
        v: `[B, T, HV, V]`, dtype as q. Any V; HV a multiple of H: value head h reads query/key head
            `h // (HV // H)`.
        g: `[B, T, HV, K]`, bfloat16 or float32: the log decay (natural log, <= 0), or with
            `use_gate_in_kernel` the raw gate.
        beta: `[B, T, HV]`, bfloat16 or float32: the write strength, or with `use_beta_sigmoid_in_kernel` its
            logit.
        scale: of the output; `K ** -0.5` by default.
        initial_state: `[N, HV, K, V]`, float32 or bfloat16; N is B, or the number of packed sequences. None
            is zeros. Never changed in place.
        output_final_state: whether the state after the last token is returned.
        cu_seqlens: `[N + 1]` int32 (int64 is cast): token t of the one row (B = 1) belongs to sequence n
            where `cu_seqlens[n] <= t < cu_seqlens[n + 1]`. Rows outside all sequences give zeros. NumPy
            offsets are checked here; those on a device are never read (see `check_cu_seqlens`), and wrong
            ones give unspecified numbers.
        use_qk_l2norm_in_kernel: q and k become `x * rsqrt(sum(x ** 2) + 1e-6)`.
        use_gate_in_kernel: the log decay is `-exp(A_log) * softplus(g + dt_bias)`, or with `safe_gate`
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        A_log: `[HV]` float32. The safe gate may leave it out (`exp(A_log)` is then 1).
        dt_bias: `[HV, K]` or `[HV * K]` float32, or None.
        safe_gate, lower_bound: see `use_gate_in_kernel`; log decays are then within `[lower_bound, 0]`.
        use_beta_sigmoid_in_kernel: beta goes through a sigmoid.
        allow_neg_eigval: that sigmoid is doubled: the state's transition may have negative eigenvalues.
        state_v_first: states are `[N, HV, V, K]`, in and out.
        state_indices: `[N]` int32 (int64 is cast), on a device or not. `initial_state` is then a pool
            `[P, HV, K, V]`: sequence n starts from `pool[state_indices[n]]`, and the updated pool is returned
            in the final state's place (donate it, and it is updated where it lies). An index outside `[0, P)`
            is a padding slot: zeros for outputs, no state read or written. Two equal indices are a mistake
            that is not looked for.
        checkpoint_every: n, a positive multiple of 64: the states behind every n-th token of each sequence
            are returned too, from the same pass. A call that starts from one of them goes on as this one did.
        route: "auto", or a name of `jax_kda.Route` to force; an error says why where it cannot run.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in v's dtype; final_state `[N, HV, K, V]`, float32 (bfloat16
        where `initial_state` is), or None. With `checkpoint_every=n` `(o, final_state, checkpoints)`:
        checkpoints `[B * (T // n), HV, K, V]` in the state's dtype, those of a row behind those of the row
        before. With `cu_seqlens` there are `T // n` of them too, as many as any offsets can need: sequence s
        has `length // n`, which begin at `checkpoint_offsets(cu_seqlens, n)[s]`, and the rest are zeros. A
        padding slot's are zeros.

    Raises:
        ValueError, TypeError: for whatever is wrong and knowable from shapes, dtypes and options.

    Examples:
        >>> import jax.numpy as jnp, numpy as np, jax_kda
        >>> q = k = v = jnp.ones((1, 40, 2, 128), jnp.bfloat16)
        >>> g, beta = jnp.full((1, 40, 2, 128), -0.1), jnp.full((1, 40, 2), 0.5)
        >>> o, state = jax_kda.kda_prefill(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        >>> o.shape, o.dtype.name, state.shape, state.dtype.name
        ((1, 40, 2, 128), 'bfloat16', (1, 2, 128, 128), 'float32')

        Two sequences of 25 and 15 tokens, packed; each has its own state:

        >>> bounds = np.cumsum([0, 25, 15])
        >>> o, states = jax_kda.kda_prefill(q, k, v, g, beta, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
        >>> o.shape, states.shape
        ((1, 40, 2, 128), (2, 2, 128, 128))

        The states behind tokens 64 and 128 of 150:

        >>> q = k = v = jnp.ones((1, 150, 2, 128), jnp.bfloat16)
        >>> g, beta = jnp.full((1, 150, 2, 128), -0.1), jnp.full((1, 150, 2), 0.5)
        >>> o, state, checkpoints = jax_kda.kda_prefill(q, k, v, g, beta, checkpoint_every=64)
        >>> checkpoints.shape
        (2, 2, 128, 128)

    Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692.
    """
    problem = contract.check(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        state_indices=state_indices,
        checkpoint_every=checkpoint_every,
        route=routing.route_name(route),
    )
    results: Any = _prefill(
        problem.options, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, state_indices
    )
    return results


def kda_decode(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    initial_state: ArrayLike,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_indices: ArrayLike | None = None,
    route: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The next 1 to 8 tokens of B sequences, for the serving loop: state in, state out.

    Arguments and results are those of `kda_prefill` with `T` from 1 to 8, `initial_state` `[B, HV, K, V]`
    required and the new state always returned, in its dtype. On NVIDIA GPUs a kernel of its own reads and
    writes each state once, where it lies if `initial_state` is donated (`jax.jit(..., donate_argnums=...)`,
    or the carry of a loop); elsewhere, and with `route="xla"`, the tokens go one after the other in plain
    JAX.

    Args:
        state_indices: `[B]` int32: `initial_state` is then a pool `[P, HV, K, V]`, and the updated pool is
            returned; see `kda_prefill`. States that no index names are not touched.
        route: "auto", "xla", or a route of `kda_prefill` to take its kernels instead.

    Examples:
        >>> import jax.numpy as jnp, jax_kda
        >>> token = jnp.ones((4, 1, 2, 128), jnp.bfloat16)  # the next one of four sequences
        >>> g, beta = jnp.full((4, 1, 2, 128), -0.1), jnp.full((4, 1, 2), 0.5)
        >>> state = jnp.zeros((4, 2, 128, 128))
        >>> o, state = jax_kda.kda_decode(token, token, token, g, beta, initial_state=state)
        >>> o.shape, state.shape
        ((4, 1, 2, 128), (4, 2, 128, 128))

        The same step for two of the six states of a pool, with two padding slots:

        >>> pool, places = jnp.zeros((6, 2, 128, 128)), jnp.array([5, -1, 0, -1])
        >>> o, pool = jax_kda.kda_decode(
        ...     token, token, token, g, beta, initial_state=pool, state_indices=places
        ... )
        >>> pool.shape, [bool((pool[p] != 0).any()) for p in range(6)]
        ((6, 2, 128, 128), [True, False, False, False, False, True])
    """
    contract.check_decode(q, initial_state)
    arguments: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "safe_gate": safe_gate,
        "lower_bound": lower_bound,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first,
        "state_indices": state_indices,
    }
    if routing.route_name(route) not in ("auto", routing.Route.XLA):
        o, state = kda_prefill(q, k, v, g, beta, **arguments, route=route)
        assert state is not None  # kda_prefill returns it by default
        return o, state
    problem = contract.check(q, k, v, g, beta, **arguments, route=routing.route_name(route))
    return _decode(problem.options, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices)


def explain_route(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, device: Any = None, route: str = "auto", **options: Any
) -> routing.Decision:
    """The route that `kda_prefill` with these arguments takes, and why: `print(jax_kda.explain_route(...))`.

    Arrays, tracers and `jax.ShapeDtypeStruct` will do. A `NamedSharding` on them counts: routes are chosen
    from the shapes that one device sees. Inside `shard_map` the shapes are those already; for a call under
    `vmap` give the batch it folds into, `[mapped * B, ...]`.

    Args:
        q, k, v, g, beta, route: as `kda_prefill` takes them.
        device: a `jax.Device`, a `jax_kda.routing.Device`, or the name of a platform ("cpu", "cuda": an H200
            where this process has no GPU). By default the device that q is on, else JAX's default device.
        options: the other keyword arguments of `kda_prefill`.

    Raises:
        ValueError, TypeError: as `kda_prefill`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_kda
        >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
        >>> beta = jax.ShapeDtypeStruct((1, 4096, 8), jnp.bfloat16)
        >>> decision = jax_kda.explain_route(x, x, x, x, beta, device="cpu")
        >>> decision.route.value, decision.reason
        ('xla', 'it needs a CUDA device, and this call is for cpu')
    """
    problem = contract.check(q, k, v, g, beta, route=routing.route_name(route), **options)
    named = {name: _typed(x) for name, x in (("q", q), ("k", k), ("v", v), ("g", g))}
    return routing.choose(partitioning.local_problem(problem, named), _device(device, q), ffi.build())


def export_checks() -> list[Any]:
    """What `jax.export` must be told to let the CUDA kernels into an artifact.

    The process that runs the artifact needs `import jax_kda` first: kernels are found by versioned names.

    Returns:
        The value of `disabled_checks` in `jax.export.export`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_kda
        >>> from jax import export
        >>> x = jax.ShapeDtypeStruct((1, 64, 1, 128), jnp.bfloat16)
        >>> beta = jax.ShapeDtypeStruct((1, 64, 1), jnp.bfloat16)
        >>> prefill, checks = jax.jit(jax_kda.kda_prefill), jax_kda.export_checks()
        >>> exported = export.export(prefill, platforms=["cuda"], disabled_checks=checks)(x, x, x, x, beta)
        >>> exported.platforms
        ('cuda',)
    """
    from jax import export  # imported late: most programs never export

    return [export.DisabledSafetyCheck.custom_call(name) for name in (ffi.PREFILL_TARGET, ffi.DECODE_TARGET)]


def _typed(x: Any) -> jax.ShapeDtypeStruct:
    typed = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(typed, "sharding", None))


def _device(device: Any, q: Any) -> routing.Device:
    if isinstance(device, routing.Device):
        return device
    if isinstance(device, str):
        try:
            device = jax.local_devices(backend=device)[0]
        except RuntimeError:
            return routing.H200 if device in ("cuda", "gpu") else routing.Device(device, device.upper())
    if device is None and not isinstance(q, jax.core.Tracer):
        found = getattr(getattr(q, "sharding", None), "device_set", None)
        device = min(found, key=lambda d: d.id) if found else None
    return ffi.device_facts(device or jax.config.jax_default_device or jax.devices()[0])


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _prefill(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
    state_indices: jax.Array | None,
) -> Any:
    """From the public shapes to the primitive's and back. Under jit: an eager call is one cached dispatch."""
    single = 0 if options.packed else 1  # of the states' [B, N, ...]: one packed row, or one sequence a row
    B, T = q.shape[:2]
    alone = replace(options, pooled=False)
    operands = _tokens_and_gate(options, q, k, v, g, beta, A_log, dt_bias)
    offsets = [] if cu_seqlens is None else [cu_seqlens.astype(jnp.int32)[None]]

    def call(initial_state: jax.Array | None) -> Any:
        states = [] if initial_state is None else [jnp.expand_dims(initial_state, single)]
        results = prefill(alone, [*operands, *states, *offsets])
        made = dict(zip(alone.result_names, results, strict=True))
        state = made.get("final_state")
        o_and_state = made["o"], None if state is None else jnp.squeeze(state, single)
        if not options.checkpoint_every:
            return o_and_state
        kept = made["checkpoints"]
        return *o_and_state, kept.reshape(B * (T // options.checkpoint_every), *kept.shape[2:])

    if state_indices is None:
        return call(initial_state)
    assert initial_state is not None  # the contract: a pool
    indices = state_indices.astype(jnp.int32)
    bounds = offsets[0][0] if offsets else None
    return pools.through_pool(call, initial_state, indices, bounds, options.checkpoint_every)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _decode(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
    initial_state: jax.Array,
    state_indices: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The same for decode."""
    operands = _tokens_and_gate(options, q, k, v, g, beta, A_log, dt_bias)
    if state_indices is not None:
        o, pool = decode(options, [*operands, initial_state, state_indices.astype(jnp.int32)])
        return o, pool
    o, state = decode(options, [*operands, jnp.expand_dims(initial_state, 1)])
    return o, jnp.squeeze(state, 1)


def _tokens_and_gate(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
) -> list[jax.Array]:
    """The primitives' operands up to the state."""
    heads, key_size = v.shape[2], q.shape[3]
    operands = [q, k, v, g, beta]
    if options.gate != GateMode.LOG:
        operands.append(jnp.zeros((1, heads), jnp.float32) if A_log is None else A_log[None])
        if dt_bias is not None:
            operands.append(dt_bias.reshape(1, heads, key_size))
    return operands
