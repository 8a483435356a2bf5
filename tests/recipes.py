"""The blocks of docs/recipes.md, run from its text, and what each must do. Used on the CPU and on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda.regimes import make_inputs

PAGE = (Path(__file__).resolve().parent.parent / "docs/recipes.md").read_text()
SECTIONS = re.findall(r"^## ([^\n]*)\n([^#]*?)```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = {title: block for title, _, block in SECTIONS}
TOKENS = ("q", "k", "v", "g", "beta")


def recipe(title: str) -> dict[str, Any]:
    """The names that the block under this title defines."""
    (block,) = (text for heading, text in BLOCKS.items() if heading.startswith(title))
    names: dict[str, Any] = {}
    exec(compile(block, f"docs/recipes.md: {title}", "exec"), names)
    return names


def inputs_of(*sizes: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call with these B, T and H, and its other arguments."""
    K, V = (128, 128) if dtype == "bfloat16" else (16, 8)
    inputs = make_inputs("slow", *sizes, K=K, V=V, dtype=dtype)
    arrays = {name: x for name, x in inputs.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in inputs.items() if name not in (*arrays, "output_final_state")}


def flax_layer(dtype: str, bar: float, jit: Any = jax.jit) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    size = 128 if dtype == "bfloat16" else 16
    module = recipe("A Flax NNX layer")["KimiDeltaAttention"]
    layer = module(64, 2, size, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    definition, parameters = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 40, 64), dtype)
    apply = jit(lambda parameters, x, state: nnx.merge(definition, parameters)(x, state))
    zeros = jnp.zeros((2, 2, size, size))
    whole, state = apply(parameters, x, zeros)
    first, middle = apply(parameters, x[:, :20], zeros)
    second, end = apply(parameters, x[:, 20:], middle)
    assert whole.shape == x.shape
    assert relative_error(jnp.concatenate([first, second], axis=1), whole) <= bar
    assert relative_error(end, state) <= bar

    def loss(parameters: Any) -> Any:
        return jnp.sum(nnx.merge(definition, parameters)(x[:, :20])[0].astype(jnp.float32) ** 2)

    for gradient in jax.tree.leaves(jit(jax.grad(loss))(parameters)):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        assert np.asarray(gradient).any()


def maxtext(dtype: str, bar: float, jit: Any = jax.jit) -> None:
    arrays, options = inputs_of(2, 30, 2, dtype=dtype)
    tokens = [arrays[name] for name in TOKENS]
    gate = {name: arrays[name] for name in ("A_log", "dt_bias")}
    ids = np.array([[1] * 12 + [2] * 18, [1] * 5 + [2] * 20 + [0] * 5], np.int32)
    attention = recipe("MaxText-style code")["attention"]
    o = jit(lambda tokens, ids: attention(*tokens, ids, 8, **gate, **options))(tokens, ids)
    for row, begin, end in ((0, 0, 12), (0, 12, 30), (1, 0, 5), (1, 5, 25)):
        part = {name: arrays[name][row : row + 1, begin:end] for name in TOKENS}
        wanted, _ = numpy_recurrence(**part, **gate, **options)
        assert relative_error(o[row : row + 1, begin:end], wanted) <= bar


def heads_first(dtype: str, bar: float, jit: Any = jax.jit) -> Any:
    """Returns the function and its arguments, for whoever wants to see it lowered."""
    arrays, options = inputs_of(2, 30, 2, dtype=dtype)
    wanted_o, wanted_state = numpy_recurrence(**arrays, **options)
    arguments = [np.moveaxis(arrays[name], 2, 0) for name in TOKENS]
    arguments += [arrays["A_log"], arrays["dt_bias"], np.moveaxis(arrays["initial_state"], 1, 0)]
    apply = recipe("Heads first")["heads_first"]

    def function(*arguments: Any) -> Any:
        return apply(*arguments, **options)

    o, state = jit(function)(*arguments)
    assert relative_error(np.moveaxis(np.asarray(o), 0, 2), wanted_o) <= bar
    assert relative_error(np.moveaxis(np.asarray(state), 0, 1), wanted_state) <= bar
    return function, arguments


def serving(dtype: str, bar: float, mesh: Mesh, compiler_options: Any = None) -> str:
    """Returns the compiled program's text."""
    arrays, options = inputs_of(2, 30, 4, dtype=dtype)
    wanted_o, wanted_state = numpy_recurrence(**arrays, **options)
    step = recipe("Serving under")["serving_step"](mesh, **options)

    def place(*axes: Any) -> Callable[[Any], jax.Array]:
        return lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    tokens = tuple(map(place("data", None, "model"), (arrays[name] for name in TOKENS)))
    state = place("data", "model")(arrays["initial_state"])
    arguments = tokens, *map(place("model"), (arrays["A_log"], arrays["dt_bias"])), state
    compiled = step.lower(*arguments).compile(compiler_options)
    o, final = compiled(*arguments)
    assert state.is_deleted()
    assert relative_error(o, wanted_o) <= bar
    assert relative_error(final, wanted_state) <= bar
    return str(compiled.as_text())


def prefix_cache(dtype: str, bar: float) -> None:
    arrays, options = inputs_of(1, 200, 2, dtype=dtype)
    arrays.pop("initial_state")
    gate = {name: arrays[name] for name in ("A_log", "dt_bias")}
    prefill = recipe("A cache of prefixes")["prefill"]
    cache: dict[tuple[int, ...], Any] = {}
    other = {name: np.concatenate([arrays[name][:, :150], arrays[name][:, :30]], axis=1) for name in TOKENS}
    prompts = ((arrays, range(200), 0), (other, (*range(150), *range(30)), 128), (arrays, range(128), 128))
    for prompt, ids, known in prompts:
        tokens = {name: prompt[name][:, : len(ids)] for name in TOKENS}
        o, state = prefill(cache, list(tokens.values()), tuple(ids), **gate, **options)
        wanted_o, wanted_state = numpy_recurrence(**tokens, **gate, **options)
        assert o.shape[1] == len(ids) - known, "tokens that the cache knows are not prefilled again"
        assert relative_error(o, wanted_o[:, known:]) <= bar
        assert relative_error(state, wanted_state) <= bar
    assert sorted(map(len, cache)) == [64, 128, 192]


def exporting(dtype: str, bar: float, jit: Any = jax.jit) -> None:
    arrays, options = inputs_of(1, 30, 2, dtype=dtype)
    artifact = recipe("Exporting")["export"](lambda x: jax_kda.kda_prefill(**x, **options), arrays)
    loaded = jax.export.deserialize(artifact)
    assert loaded.platforms == ("cpu", "cuda")
    o, state = jit(loaded.call)(arrays)
    wanted_o, wanted_state = numpy_recurrence(**arrays, **options)
    assert relative_error(o, wanted_o) <= bar
    assert relative_error(state, wanted_state) <= bar


CHECKS: dict[str, Callable[..., Any]] = {
    "A Flax NNX layer": flax_layer,
    "MaxText-style code": maxtext,
    "Heads first": heads_first,
    "Serving under": serving,
    "A cache of prefixes": prefix_cache,
    "Exporting": exporting,
}
