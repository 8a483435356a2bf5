"""Loading the extension: whatever is wrong with it, the package imports, says so, and registers nothing."""

import subprocess
import sys
import types

import jax
import pytest

import jax_kda
from jax_kda import ffi, routing

INSTALLED = ffi.installed_ffi_version()


def extension(**changes):
    info = {
        "cuda": True,
        "architectures": ["90a", "100a"],
        "reason": "nvcc 13.0",
        "ffi_api_version": (0, 1),
        "cuda_version": "13.0",
    } | changes
    module = types.ModuleType("jax_kda._native")
    module.build_info = lambda: info
    module.handlers = lambda: {ffi.PREFILL_TARGET: "a capsule"}
    return module


@pytest.fixture
def load(monkeypatch):
    """Loads a pretended extension; returns its status and what it registered."""
    registered = []

    def register(name, capsule, platform):
        registered.append((name, capsule, platform))

    def load(module):
        monkeypatch.setitem(sys.modules, "jax_kda._native", module)
        monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
        return ffi.status.__wrapped__(), registered

    return load


def test_a_good_extension_is_registered(load):
    status, registered = load(extension())
    assert status.cuda
    assert registered == [("jax_kda.prefill.v1", "a capsule", "CUDA")]
    text = str(status)
    for part in (
        "CUDA kernels   loaded",
        "sm_90a, sm_100a",
        "nvcc 13.0",
        "jax_kda.prefill.v1",
        "built for 0.1",
    ):
        assert part in text


def test_the_installed_version_is_known():
    assert INSTALLED is not None
    assert INSTALLED >= (0, 1)


@pytest.mark.parametrize("version", [(0, INSTALLED[1] + 1), (1, 0)])
def test_an_extension_newer_than_jaxlib_steps_aside(load, version):
    status, registered = load(extension(ffi_api_version=version))
    assert registered == []
    assert not status.cuda
    assert f"built for XLA FFI API {version[0]}.{version[1]}" in status.summary
    assert "rebuild jax_kda with this jaxlib" in status.summary


def test_an_extension_of_the_same_version_is_registered(load):
    assert load(extension(ffi_api_version=INSTALLED))[0].cuda


def test_no_headers_no_registration(load, monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    status, registered = load(extension())
    assert (status.cuda, registered) == (False, [])
    assert "of unknown version" in status.summary


def test_no_extension(load):
    status, registered = load(None)  # None in sys.modules: the import fails as if there were no such file
    assert (status.cuda, registered) == (False, [])
    assert status.summary == "the package was installed without its extension"
    assert "not loaded" in str(status)
    assert "unknown" in str(status)


def test_a_broken_extension(load):
    module = extension()

    def broken():
        raise ImportError("undefined symbol: x")

    module.build_info = broken
    status, registered = load(module)
    assert (status.cuda, registered) == (False, [])
    assert status.summary == "it cannot be loaded: undefined symbol: x"


def test_an_extension_without_cuda(load):
    status, registered = load(extension(cuda=False, architectures=[], reason="no nvcc"))
    assert (status.cuda, status.summary, registered) == (False, "no nvcc", [])
    status, _ = load(extension(cuda=False, architectures=[], reason=""))
    assert status.summary == "it was built without CUDA"


def test_a_refusal_by_jaxlib(load, monkeypatch):
    module = extension()

    def refused():
        raise RuntimeError("API version mismatch")

    module.handlers = refused
    status, _ = load(module)
    assert not status.cuda
    assert status.summary == "jaxlib refused its handlers: API version mismatch"


def test_build_is_the_status_for_routing(monkeypatch):
    found = ffi.Status(True, "fine", architectures=("90a",))
    monkeypatch.setattr(ffi, "status", lambda: found)
    assert ffi.build() == routing.Build(cuda=True, architectures=("90a",), reason="fine")


def test_status_is_public_and_cached():
    assert jax_kda.status() is jax_kda.status()


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        (
            {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": "9.0", "core_count": 132},
            routing.H200,
        ),
        (
            {"platform": "gpu", "device_kind": "AMD", "compute_capability": "gfx942"},
            routing.Device("gpu", "AMD"),
        ),
        ({"platform": "gpu", "device_kind": "?"}, routing.Device("gpu", "?")),
        ({"platform": "cpu", "device_kind": "cpu"}, routing.CPU),
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, routing.Device("tpu", "TPU")),
    ],
)
def test_device_facts(facts, device):
    assert ffi.device_facts(types.SimpleNamespace(**facts)) == device


def test_import_leaves_jax_alone():
    """In a fresh process: `import jax_kda` starts no backend, and JAX works afterwards."""
    script = (
        "import jax_kda, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once a backend has started
        "assert len(jax.devices('cpu')) == 3\n"
        "print(jax.numpy.ones(2).sum())"
    )
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("2.0", 0), done.stderr
