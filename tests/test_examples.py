"""The examples: they run, and do what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def serving(monkeypatch):
    spec = importlib.util.spec_from_file_location("serving", EXAMPLES / "serving.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serving", module)
    spec.loader.exec_module(module)
    return module


def test_serving_matches_the_token_reference(serving):
    """Sixty-four decoded tokens in float32; the fourth place in the batch is empty."""
    sizes = serving.Sizes(vocabulary=64, width=32, heads=2, channels=16, rank=8)
    served = serving.serve(sizes, (9, 2, 40, 3), 64, jnp.float32, (4, 0, 2, -1), pool=6)
    assert served.tokens.shape == (65, 4)
    assert max(served.errors[:3]) < 1e-4
    # The empty place kept no state, so that its tokens cannot have been those of its prompt.
    assert served.errors[3] > 1e-2
    states = np.asarray(served.cache.states)
    assert all(states[slot].any() for slot in (4, 0, 2))
    assert not any(states[slot].any() for slot in (1, 3, 5))


def test_a_slot_can_be_used_again(serving):
    """The second prompt into a slot does not meet the first one's state."""
    sizes = serving.Sizes(vocabulary=64, width=32, heads=2, channels=16, rank=8)
    params = serving.make_params(sizes, jnp.float32)
    offsets, slots = np.array([0, 5], np.int32), np.array([1], np.int32)
    prompts = np.arange(10, dtype=np.int32).reshape(2, 1, 5)
    fresh = serving.empty_cache(sizes, 2, jnp.float32)
    _, used = serving.prefill(params, prompts[0], offsets, slots, fresh)
    got = serving.prefill(params, prompts[1], offsets, slots, used)
    wanted = serving.prefill(params, prompts[1], offsets, slots, fresh)
    np.testing.assert_allclose(got[1].states, wanted[1].states, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1].inputs, wanted[1].inputs)
    assert np.abs(used.states - wanted[1].states).max() > 1e-2


@pytest.mark.gpu
def test_serving_on_a_gpu(serving, capsys):
    """In bfloat16, with heads of 128 channels: through the kernels."""
    assert serving.main([]) == 0
    assert "right" in capsys.readouterr().out
