"""docs/recipes.md on the CPU, from its text."""

import jax
import numpy as np
import pytest
import recipes
from calls import jit
from jax.sharding import Mesh

BAR = 1e-4  # float32 through the chunk form


def test_every_recipe_is_checked():
    assert len(recipes.BLOCKS) == len(recipes.CHECKS) == recipes.PAGE.count("```python")
    assert all(title.startswith(start) for title, start in zip(recipes.BLOCKS, recipes.CHECKS, strict=True))


def test_a_flax_nnx_layer():
    recipes.flax_layer("float32", BAR, jit)


def test_maxtext_style_code():
    recipes.maxtext("float32", BAR, jit)


def test_heads_first(cuda_build):
    recipes.heads_first("float32", BAR, jit)
    # What the page promises: one kernel, and nothing transposed.
    function, arguments = recipes.heads_first("bfloat16", 6e-3, jit)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("custom_call @jax_kda") == 1
    assert "stablehlo.transpose" not in lowered


def test_serving_under_shard_map():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    text = recipes.serving("float32", BAR, mesh, {"xla_backend_optimization_level": 0})
    for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"):
        assert name not in text


def test_a_cache_of_prefixes():
    recipes.prefix_cache("float32", BAR)


def test_exporting():
    pytest.importorskip("flatbuffers")
    recipes.exporting("float32", BAR, jit)
