"""The build, the FFI handler's checks, and what the README promises of both."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kda

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# ------------------------------------------------------------------------------------------ the extension


@pytest.fixture(scope="module")
def native() -> Any:
    return importlib.import_module("jax_kda._native")


def test_the_build_says_what_it_holds(native: Any) -> None:
    info = native.build_info()
    assert set(info) == {"cuda", "architectures", "cuda_version", "reason", "ffi_api_version"}
    assert info["ffi_api_version"] >= (0, 1)
    assert info["reason"].startswith("built with")
    if info["cuda"]:
        assert all(re.fullmatch(r"\d{2,3}[af]?", name) for name in info["architectures"])
        assert re.fullmatch(r"\d+\.\d+", info["cuda_version"])
        assert list(native.handlers()) == ["jax_kda.prefill.v1", "jax_kda.decode.v1"]
    else:
        assert info["architectures"] == ()
        assert info["cuda_version"] == ""
        assert native.handlers() == {}


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd")
def test_the_extension_imports_without_a_driver_or_a_toolkit(native: Any) -> None:
    needs = subprocess.run(["ldd", native.__file__], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"libcuda|libnv|not found", needs)


def test_only_ffi_cc_knows_xla() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".cc", ".cu", ".h", ".cuh"):
            includes = re.findall(r"#include [<\"](xla/[^>\"]+)", path.read_text())
            allowed = {"ffi.cc": ["xla/ffi/api/ffi.h"], "module.cc": ["xla/ffi/api/c_api.h"]}
            assert includes == allowed.get(path.name, [])


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize(
    ("defines", "message"),
    [
        (["-DJAX_KDA_CUDA=MAYBE"], "JAX_KDA_CUDA is 'MAYBE'; it must be AUTO, ON or OFF"),
        (["-DJAX_KDA_CUDA=ON", "-DCMAKE_CUDA_COMPILER=true"], "JAX_KDA_CUDA=ON, but: .* does not answer"),
    ],
)
def test_cmake_refuses(tmp_path: Path, defines: list[str], message: str) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), *defines]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "or higher is required" in run.stderr:
        pytest.skip("this cmake is too old")
    assert run.returncode != 0
    assert re.search(message, " ".join(run.stderr.split()))


# ------------------------------------------------------------------------------------------ the README


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("jax_kda") == PROJECT["version"]
    releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == PROJECT["version"]


def test_the_first_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert len(promised) == 2
    assert printed[:2] == promised


def test_the_readme_names_the_routes_and_the_versions() -> None:
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) == [route.value for route in jax_kda.Route]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "| Python | 3.11 to 3.13 |" in README
    assert "jax>=0.8" in PROJECT["dependencies"]
    assert "| JAX | 0.8 and later |" in README


# ------------------------------------------------------------------------------------------ the handler
# csrc/ffi.cc is compiled against a launch.h that records instead of launching, bound without a stream, and
# registered for the CPU: so XLA's own decoding and every check run on machines without a GPU.

RECORDER = r"""
#include "ffi.cc"

static std::string last;
static int status = 0;
extern "C" const char* last_call() { return last.c_str(); }
extern "C" void set_status(int value) { status = value; }

namespace jax_kda {
const char* compiled_architectures() { return "90a,100a"; }
int64_t workspace_bytes(Route, const PrefillArgs& a) { return 4 * a.B * a.HV; }
cudaError_t prefill(Route, const PrefillArgs& a, cudaStream_t) {
  last = "{";
  auto field = [](const char* name, double value) {
    last += std::string(last.size() > 1 ? ", " : "") + '"' + name + "\": " + std::to_string(value);
  };
  field("B", a.B), field("T", a.T), field("N", a.N), field("H", a.H), field("HV", a.HV);
  field("R", a.gate_rows);
  field("g_dtype", int(a.g_dtype)), field("beta_dtype", int(a.beta_dtype));
  field("state_in_dtype", int(a.state_in_dtype)), field("state_out_dtype", int(a.state_out_dtype));
  field("gate", int(a.gate)), field("beta", int(a.beta_mode));
  field("l2norm", a.l2norm), field("state_v_first", a.state_v_first);
  field("scale", a.scale), field("lower_bound", a.lower_bound), field("workspace_bytes", a.workspace_bytes);
  field("A_log", a.a_log != nullptr), field("dt_bias", a.dt_bias != nullptr);
  field("initial_state", a.initial_state != nullptr), field("offsets", a.offsets != nullptr);
  field("final_state", a.final_state != nullptr), field("checkpoints", a.checkpoints != nullptr);
  field("checkpoint_every", a.checkpoint_every);
  last += "}";
  return static_cast<cudaError_t>(status);
}

cudaError_t decode(const DecodeArgs& a, cudaStream_t) {
  last = "{";
  auto field = [](const char* name, double value) {
    last += std::string(last.size() > 1 ? ", " : "") + '"' + name + "\": " + std::to_string(value);
  };
  field("B", a.B), field("T", a.T), field("H", a.H), field("HV", a.HV), field("P", a.P);
  field("R", a.gate_rows);
  field("g_dtype", int(a.g_dtype)), field("beta_dtype", int(a.beta_dtype));
  field("state_dtype", int(a.state_dtype));
  field("gate", int(a.gate)), field("beta", int(a.beta_mode));
  field("l2norm", a.l2norm), field("state_v_first", a.state_v_first);
  field("scale", a.scale), field("lower_bound", a.lower_bound), field("columns", a.columns);
  field("A_log", a.a_log != nullptr), field("dt_bias", a.dt_bias != nullptr);
  field("state_indices", a.state_indices != nullptr);
  last += "}";
  return static_cast<cudaError_t>(status);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(recorded, [](auto... x) { return prefill_call(nullptr, x...); },
                              bind_prefill(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(recorded_decode, [](auto... x) { return decode_call(nullptr, x...); },
                              bind_decode(ffi::Ffi::Bind()));
}  // namespace jax_kda
"""

TARGET = "jax_kda.test.recorded"
DECODE_TARGET = "jax_kda.test.recorded_decode"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    nvcc = shutil.which("nvcc")
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    homes += [Path(nvcc).resolve().parents[1]] if nvcc else []
    cuda = next((home for home in homes if (home / "include/cuda_runtime_api.h").is_file()), None)
    compiler = shutil.which("g++")
    if cuda is None or compiler is None:
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.cc").write_text(RECORDER)
    library = folder / "recorder.so"
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O0", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library),
            *(f"-I{ROOT / 'csrc'}", "-isystem", jax.ffi.include_dir(), "-isystem", cuda / "include"),
            *(folder / "recorder.cc", f"-L{cuda / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
        ],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.last_call.restype = ctypes.c_char_p
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.recorded), platform="cpu")
    jax.ffi.register_ffi_target(DECODE_TARGET, jax.ffi.pycapsule(loaded.recorded_decode), platform="cpu")
    return loaded


class Call:
    """One call of the handler: packed, safe gate, every optional operand there. Tests change one thing."""

    def __init__(self, B: int = 2, T: int = 5, N: int = 3, H: int = 1, HV: int = 2) -> None:
        bf16, f32 = jnp.bfloat16, jnp.float32
        self.operands: dict[str, tuple[tuple[int, ...], Any]] = {
            "q": ((B, T, H, 128), bf16),
            "k": ((B, T, H, 128), bf16),
            "v": ((B, T, HV, 128), bf16),
            "g": ((B, T, HV, 128), bf16),
            "beta": ((B, T, HV), f32),
            "A_log": ((B, HV), f32),
            "dt_bias": ((B, HV, 128), f32),
            "initial_state": ((B, N, HV, 128, 128), bf16),
            "offsets": ((B, N + 1), jnp.int32),
        }
        self.results: dict[str, tuple[tuple[int, ...], Any]] = {
            "o": ((B, T, HV, 128), bf16),
            "final_state": ((B, N, HV, 128, 128), f32),
            "workspace": ((4 * B * HV,), jnp.uint8),
            "checkpoints": ((0,), f32),
        }
        self.attributes: dict[str, Any] = {
            "scale": np.float32(0.25),
            "lower_bound": np.float32(-5),
            "gate": np.int32(2),
            "beta": np.int32(1),
            "l2norm": np.bool_(True),
            "state_v_first": np.bool_(False),
            "segment_chunks": np.int32(0),
            "checkpoint_every": np.int32(0),
            "route": "baseline_m128",
        }

    def change(self, **changes: Any) -> Call:
        for name, value in changes.items():
            typed = isinstance(value, tuple)  # `beta` is an operand and an attribute
            group = self.attributes if not typed else self.operands if name in self.operands else self.results
            assert name in group
            group[name] = value
        return self

    def run(self) -> None:
        results = [jax.ShapeDtypeStruct(*typed) for typed in self.results.values()]
        operands = [jnp.zeros(*typed) for typed in self.operands.values()]
        jax.block_until_ready(jax.ffi.ffi_call(TARGET, results)(*operands, **self.attributes))


ABSENT = ((0,), jnp.float32)


def test_the_handler_decodes_everything(recorder: ctypes.CDLL) -> None:
    Call().run()
    assert json.loads(recorder.last_call()) == {
        "B": 2, "T": 5, "N": 3, "H": 1, "HV": 2, "R": 2,
        "g_dtype": 1, "beta_dtype": 0, "state_in_dtype": 1, "state_out_dtype": 0,
        "gate": 2, "beta": 1, "l2norm": 1, "state_v_first": 0,
        "scale": 0.25, "lower_bound": -5, "workspace_bytes": 16,
        "A_log": 1, "dt_bias": 1, "initial_state": 1, "offsets": 1, "final_state": 1,
        "checkpoints": 0, "checkpoint_every": 0,
    }  # fmt: skip


def test_the_handler_knows_what_is_absent(recorder: ctypes.CDLL) -> None:
    optional = dict.fromkeys(("A_log", "dt_bias", "initial_state", "final_state"), ABSENT)
    Call().change(**optional, offsets=((0,), jnp.int32), gate=np.int32(0)).run()
    seen = json.loads(recorder.last_call())
    assert {seen[name] for name in (*optional, "offsets", "gate")} == {0}
    assert (seen["N"], seen["R"]) == (1, 1)


def test_the_handler_takes_checkpoints(recorder: ctypes.CDLL) -> None:
    bf16 = {"checkpoints": ((2, 2, 2, 128, 128), jnp.bfloat16), "final_state": ABSENT}
    Call(T=130).change(**bf16, checkpoint_every=np.int32(64)).run()
    seen = json.loads(recorder.last_call())
    assert (seen["checkpoints"], seen["checkpoint_every"], seen["state_out_dtype"]) == (1, 64, 1)
    Call(T=63).change(checkpoints=((2, 0, 2, 128, 128), jnp.float32), checkpoint_every=np.int32(64)).run()
    seen = json.loads(recorder.last_call())
    assert (seen["checkpoints"], seen["checkpoint_every"]) == (0, 64)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"N": 0}])
def test_empty_calls_pass(recorder: ctypes.CDLL, sizes: dict[str, int]) -> None:
    Call(**sizes).run()
    seen = json.loads(recorder.last_call())
    assert {name: seen[name] for name in sizes} == sizes


BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((2, 5, 128), BF16)}, r"q has shape \[2, 5, 128\], expected \[B, T, H, 128\]"),
        ({"q": ((2, 5, 1, 64), BF16)}, r"q has shape \[2, 5, 1, 64\], expected \[2, 5, 1, 128\]"),
        ({"k": ((2, 4, 1, 128), BF16)}, r"k has shape \[2, 4, 1, 128\], expected \[2, 5, 1, 128\]"),
        ({"v": ((2, 5, 2), BF16)}, r"v has shape \[2, 5, 2\], expected \[B, T, HV, 128\]"),
        ({"v": ((3, 5, 2, 128), BF16)}, r"v has shape \[3, 5, 2, 128\], expected \[2, 5, 2, 128\]"),
        ({"q": ((2, 5, 3, 128), BF16)}, r"v has 2 heads, q has 3; expected a multiple"),
        ({"q": ((2, 5, 0, 128), BF16)}, r"v has 2 heads, q has 0; expected a multiple"),
        ({"g": ((2, 5, 1, 128), BF16)}, r"g has shape \[2, 5, 1, 128\], expected \[2, 5, 2, 128\]"),
        ({"beta": ((2, 5, 2, 1), F32)}, r"beta has shape \[2, 5, 2, 1\], expected \[2, 5, 2\]"),
        ({"A_log": ((3, 2), F32)}, r"A_log has 3 rows, expected 1 or the batch's 2"),
        ({"A_log": ((2, 1), F32)}, r"A_log has shape \[2, 1\], expected \[2, 2\]"),
        ({"A_log": ABSENT}, r"A_log has shape \[0\], expected \[1, 2\]"),
        ({"gate": np.int32(0)}, r"A_log has shape \[2, 2\], expected \[0\]"),
        ({"dt_bias": ((1, 2, 128), F32)}, r"dt_bias has shape \[1, 2, 128\], expected \[2, 2, 128\]"),
        ({"initial_state": ((2, 1, 2, 128, 128), F32)}, r"initial_state has .* \[2, 3, 2, 128, 128\]"),
        ({"final_state": ((2, 4, 2, 128, 128), F32)}, r"final_state has .*, expected \[2, 3, 2, 128, 128\]"),
        ({"offsets": ((1, 4), jnp.int32)}, r"offsets has shape \[1, 4\], expected \[2, 4\]"),
        ({"offsets": ((4,), jnp.int32)}, r"offsets has shape \[4\], expected \[B, N \+ 1\]"),
        ({"offsets": ((2, 0), jnp.int32)}, r"offsets has shape \[2, 0\], expected \[B, N \+ 1\]"),
        ({"o": ((2, 5, 1, 128), BF16)}, r"o has shape \[2, 5, 1, 128\], expected \[2, 5, 2, 128\]"),
        ({"q": ((2, 5, 1, 128), F16)}, r"q is f16, expected bf16"),
        ({"o": ((2, 5, 2, 128), F32)}, r"o is f32, expected bf16"),
        ({"g": ((2, 5, 2, 128), F16)}, r"g is f16, expected bf16 or f32"),
        ({"beta": ((2, 5, 2), jnp.int8)}, r"beta is another dtype, expected bf16 or f32"),
        ({"A_log": ((2, 2), BF16)}, r"A_log is bf16, expected f32"),
        ({"dt_bias": ((2, 2, 128), BF16)}, r"dt_bias is bf16, expected f32"),
        ({"initial_state": ((2, 3, 2, 128, 128), F16)}, r"initial_state is f16, expected f32 or bf16"),
        ({"offsets": ((2, 4), F32)}, r"offsets is f32, expected s32"),
        ({"checkpoints": ((2, 0, 2, 128, 128), F32)}, r"checkpoints has .*128\], expected \[0\]"),
        ({"checkpoint_every": np.int32(64)}, r"checkpoints has shape \[0\], expected \[2, 0, 2, 128, 128\]"),
        ({"checkpoint_every": np.int32(96)}, r"checkpoint_every is 96, expected 0 or a positive multiple"),
        ({"checkpoint_every": np.int32(-64)}, r"checkpoint_every is -64, expected 0 or a positive multiple"),
        (
            {"checkpoint_every": np.int32(64), "checkpoints": ((2, 0, 2, 128, 128), BF16)},
            r"checkpoints and final_state have different dtypes",
        ),
        (
            {"checkpoint_every": np.int32(64), "checkpoints": ((2, 0, 2, 128, 128), F16)},
            r"checkpoints is f16, expected f32 or bf16",
        ),
        ({"workspace": ((15,), jnp.uint8)}, r"workspace has 15 bytes, this route needs 16"),
        ({"workspace": ((16,), jnp.int8)}, r"workspace is another dtype, expected u8"),
        ({"gate": np.int32(3)}, r"gate is 3, expected 0, 1 or 2"),
        ({"gate": np.int32(-1)}, r"gate is -1, expected 0, 1 or 2"),
        ({"beta": np.int32(9)}, r"beta mode is 9, expected 0, 1 or 2"),
        ({"route": "fastest"}, r"route is 'fastest', this build has baseline_m128, baseline_m64, c4_m1"),
        ({"scale": np.int32(1)}, r"Wrong scalar data type: expected F32 but got S32"),
    ],
)  # fmt: skip
def test_the_handler_refuses(recorder: ctypes.CDLL, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Call().change(**changes).run()


@pytest.fixture
def failing(recorder: ctypes.CDLL) -> Any:
    yield recorder.set_status
    recorder.set_status(0)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (1, r"launching route baseline_m128 failed: cudaErrorInvalidValue \(invalid argument\)"),
        (209, r"machine code for compute capabilities 90a,100a, the device has .*route=\"xla\""),
    ],
)
def test_the_handler_reports_cuda_errors(failing: Callable[[int], None], status: int, message: str) -> None:
    failing(status)
    with pytest.raises(Exception, match=message):
        Call().run()


class DecodeCall(Call):
    """The same for decode: from a pool of 7 states. `aliases` are those of the custom call."""

    def __init__(self, B: int = 2, T: int = 5, P: int = 7, H: int = 1, HV: int = 2) -> None:
        super().__init__(B, T, 1, H, HV)
        for name in ("initial_state", "offsets"):
            del self.operands[name]
        state = ((P, HV, 128, 128), jnp.bfloat16)
        self.operands |= {"state": state, "state_indices": ((B,), jnp.int32)}
        self.results = {"o": self.results["o"], "new_state": state}
        for name in ("route", "segment_chunks", "checkpoint_every"):
            del self.attributes[name]
        self.aliases = {7: 1}

    def run(self) -> None:
        results = [jax.ShapeDtypeStruct(*typed) for typed in self.results.values()]
        operands = [jnp.zeros(*typed) for typed in self.operands.values()]
        call = jax.ffi.ffi_call(DECODE_TARGET, results, input_output_aliases=self.aliases)
        jax.block_until_ready(call(*operands, **self.attributes))


def test_the_decode_handler_decodes_everything(recorder: ctypes.CDLL) -> None:
    DecodeCall().run()
    wanted = {
        "B": 2, "T": 5, "H": 1, "HV": 2, "P": 7, "R": 2,
        "g_dtype": 1, "beta_dtype": 0, "state_dtype": 1,
        "gate": 2, "beta": 1, "l2norm": 1, "state_v_first": 0, "scale": 0.25, "lower_bound": -5,
        "columns": 0, "A_log": 1, "dt_bias": 1, "state_indices": 1,
    }  # fmt: skip
    assert json.loads(recorder.last_call()) == wanted
    dense = ((2, 1, 2, 128, 128), F32)
    optional = {"A_log": ABSENT, "dt_bias": ABSENT, "gate": np.int32(0), "state_indices": ((0,), jnp.int32)}
    DecodeCall().change(**optional, state=dense, new_state=dense).run()
    without = {"A_log": 0, "dt_bias": 0, "gate": 0, "state_indices": 0, "P": 2, "R": 1, "state_dtype": 0}
    assert json.loads(recorder.last_call()) == wanted | without


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            DecodeCall().change(k=((2, 5, 1, 64), BF16)),
            r"k has shape \[2, 5, 1, 64\], expected \[2, 5, 1, 128\]",
        ),
        (DecodeCall(T=9), r"q has T = 9 tokens, expected 1 to 8"),
        (DecodeCall(T=0), r"q has T = 0 tokens, expected 1 to 8"),
        (
            DecodeCall().change(**dict.fromkeys(("state", "new_state"), ((7, 2, 128, 64), BF16))),
            r"the state has shape \[7, 2, 128, 64\], expected \[7, 2, 128, 128\]",
        ),
        (
            DecodeCall().change(state_indices=((0,), jnp.int32)),
            r"initial_state has shape \[7, 2, 128, 128\], expected \[2, 1, 2, 128, 128\]",
        ),
        (
            DecodeCall().change(**dict.fromkeys(("state", "new_state"), ((7, 2, 128, 128), F16))),
            r"the state is f16, expected f32 or bf16",
        ),
        (
            DecodeCall().change(state_indices=((3,), jnp.int32)),
            r"state_indices has shape \[3\], expected \[2\]",
        ),
        (DecodeCall().change(state_indices=((2,), F32)), r"state_indices is f32, expected s32"),
        (
            DecodeCall().change(new_state=((6, 2, 128, 128), BF16)),
            r"the new state has shape \[6, 2, 128, 128\]",
        ),
    ],
)
def test_the_decode_handler_refuses(recorder: ctypes.CDLL, call: DecodeCall, message: str) -> None:
    if call.operands["state"] != call.results["new_state"]:
        call.aliases = {}
    with pytest.raises(Exception, match=message):
        call.run()


def test_decode_is_in_place_or_not_at_all(recorder: ctypes.CDLL) -> None:
    call = DecodeCall()
    call.aliases = {}
    with pytest.raises(Exception, match="the state and the new state must be one buffer"):
        call.run()


def test_the_decode_handler_reports_cuda_errors(failing: Callable[[int], None]) -> None:
    failing(1)
    with pytest.raises(Exception, match="launching route decode failed: cudaErrorInvalidValue"):
        DecodeCall().run()
