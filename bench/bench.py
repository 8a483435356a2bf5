# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kimi Delta Attention for JAX, measured
#
# What the operation computes, whether it is right in every gate regime, and how fast it is: against other
# implementations, against its own baseline, and against the memory. `python -m bench.notebook` runs this, in
# a minute on a CPU: times then come from the rows in `bench/results`. With `--mode measure`, on a GPU, they
# are measured anew; `--mode write` also writes them there.

# %%
import functools
import io
import os
import sys
import tempfile
from pathlib import Path

# The native driver needs memory beside JAX. Set before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "bench" / "rows.py").is_file())
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_kda
from bench import figures, peers, prefill, progress, readme, records, tables, wall
from jax_kda import regimes

# quick: times come from bench/results. measure, where there is a GPU: anew. write: and they are kept there.
MODE = os.environ.get("JAX_KDA_BENCH") or ("quick" if wall.unavailable() else "measure")
assert MODE in ("quick", "measure", "write"), MODE
print(f"mode {MODE}; this machine: {jax.devices()[0].device_kind}; jax {jax.__version__}")


def show(what, otherwise=""):
    """A figure or a table; where there is none, the line that says why."""
    if isinstance(what, Figure):
        picture = io.BytesIO()
        what.savefig(picture, dpi=90)
        display(Image(picture.getvalue()))
    else:
        display(Markdown(what or otherwise))


# %% [markdown]
# ## What it computes
#
# One state `S[K, V]` per sequence and head goes through the tokens in order: it decays, each key channel at
# its own rate, then the delta rule writes what the key did not predict yet, then the query reads.

# %%
B, T, H, K = 1, 100, 2, 128
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((B, T, H, K), np.float32) for _ in range(3))
k /= np.linalg.norm(k, axis=-1, keepdims=True)
g = -np.abs(rng.standard_normal((B, T, H, K), np.float32))  # log decays
beta = rng.uniform(0, 1, (B, T, H)).astype(np.float32)  # write strengths

o, S = np.zeros((B, T, H, K)), np.zeros((B, H, K, K))
for t in range(T):
    S = np.exp(g[:, t])[..., None] * S
    u = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
    S = S + k[:, t][..., None] * u[..., None, :]
    o[:, t] = K**-0.5 * np.einsum("bhkv,bhk->bhv", S, q[:, t])


def error(found, expected):
    """The relative Frobenius error."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


its_o, its_S = jax.jit(functools.partial(jax_kda.kda_prefill, route="xla"))(q, k, v, g, beta)
print(f"kda_prefill in float32 against these lines: o {error(its_o, o):.1e}, state {error(its_S, S):.1e}")

# %% [markdown]
# ## Is it right? Every gate regime, here and now
#
# bfloat16 inputs, the route that `auto` takes on this machine, against the token recurrence in float64. The
# regimes differ in how fast the state forgets; an implementation can be right in one and wrong, or a hundred
# times slower, in another.

# %%
tokens, heads = (2048, 4) if jax.devices()[0].platform == "gpu" else (200, 2)


@functools.cache
def compiled(function, options):
    """One compilation serves the regimes that differ in numbers alone."""
    return jax.jit(functools.partial(function, **dict(options)))


live = {}
for regime in tqdm(regimes.REGIMES, unit="regime", leave=False, disable=progress.disabled()):
    call = regimes.make_inputs(regime, 1, tokens, heads)
    arrays = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in call.items() if name not in arrays}
    route = jax_kda.explain_route(**jax.device_put(arrays), **static).route.value
    found = compiled(jax_kda.kda_prefill, tuple(static.items()))(**arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = {**static, "dtype": jnp.dtype("float64")}
        expected = compiled(jax_kda.kda_reference, tuple(exact.items()))(**arrays)
    live.setdefault(route, {})[regime] = tuple(map(error, found, expected))
show(figures.errors(live, f"here: 1 x {tokens} tokens x {heads} heads, {jax.devices()[0].device_kind}"))

# %% [markdown]
# And on the GPU that the rows in `bench/results` come from, as its tests found them.

# %%
tests = records.gpu_tests()
show(figures.accuracy(tests), "No record of tests on a GPU yet in bench/results.")
show(tables.accuracy(tests))

# %% [markdown]
# ## The rows
#
# GPU time of one call, inputs on the device, the L2 cache flushed before each; see `bench/prefill.py`. A
# ratio is only ever made of two rows of one run. The next cell measures anew where it was asked to. Rows name
# the product digest they were measured on: if `python bench/digest.py` prints another one, the code has
# changed since.

# %%
folder = records.FOLDER
if why := "this is the quick mode" if MODE == "quick" else wall.unavailable():
    print(f"nothing is timed here, since {why}: the rows are those in bench/results")
else:
    if MODE == "measure":
        folder = Path(tempfile.mkdtemp())
    routes = ["auto", *(r.value for r in jax_kda.Route if r is not jax_kda.Route.XLA)]
    prefill.main(["--routes", ",".join(routes), "--out", str(folder / records.PREFILL)])
    peers.main(["--out", str(folder / records.PEERS), "--decode-out", str(folder / records.DECODE_PEERS)])

ours = records.load(records.PREFILL, folder)
beside = records.load(records.PEERS, folder)
steps = records.load(records.DECODE)
for name, found in ((records.PREFILL, ours), (records.PEERS, beside), (records.DECODE, steps)):
    print(f"{name}: {len(found)} rows. {records.provenance(found) if found else records.missing(name)}")

# %% [markdown]
# ## Against other implementations, on gates that forget fast and gates that forget slowly
#
# Side by side, since some peers are fast only where the state forgets: their segments start from zeros and
# rely on it. All in one process; `cudnn_exact` gets prepared inputs, and the passes that make them are not in
# its figure.

# %%
show(figures.times(beside), records.missing(records.PEERS))
show(tables.peers(beside, figures.README_SETS) if beside else "")

# %% [markdown]
# Ours alone, every route that was timed:

# %%
show(figures.times(ours), records.missing(records.PREFILL))

# %% [markdown]
# How much the gates matter to ours: the largest difference between two regimes at one shape.

# %%
print(f"{100 * tables.regimes_spread(ours):.1f} %" if ours else records.missing(records.PREFILL))

# %% [markdown]
# ## Speedup over the baseline, as in the seed's table
#
# With few sequences and heads most of a GPU is idle. The design note that this project started from spreads
# the work that needs no state over helper CTAs (C4), and reports what that brings on a B200; these are its
# shapes.

# %%
seed = records.published()
show(figures.speedup(ours, seed), "No rows yet of another route than the baseline at these shapes.")
show(tables.speedup(ours, seed), f"The seed's table: {seed['source']}.")

# %% [markdown]
# ## How close to the memory
#
# The floor is the time that the bytes of the token arrays take at the rate of a plain copy, measured in the
# same run. Nothing that reads and writes these arrays can be faster.

# %%
show(figures.shares(ours), records.missing(records.PREFILL))

# %% [markdown]
# ## Which route wins where
#
# Each mark is a shape that was timed, its form and colour the fastest route there; the ground is what `auto`
# takes, from the regions in `jax_kda/regions.py`. Where a mark and its ground disagree, the regions have to
# follow.

# %%
show(figures.winners(ours), records.missing(records.PREFILL))
show(tables.routed(), "No regions yet: `auto` takes the baseline wherever it serves.")

# %% [markdown]
# ## Longer sequences

# %%
show(figures.scaling(ours), records.missing(records.PREFILL))

# %% [markdown]
# ## Decoding
#
# One step takes 1 to 8 tokens of each sequence, and has to read and write every state.

# %%
show(figures.decode(steps), records.missing(records.DECODE))

# %% [markdown]
# ## Every row that was drawn

# %%
show(tables.times(ours, "production", readme.SETS) if ours else "", records.missing(records.PREFILL))
