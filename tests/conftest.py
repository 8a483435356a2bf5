"""Four CPU devices for every test, the --big switch, and GPU tests skipped where there is no GPU."""

import os

# Before jax starts its CPU backend: the sharding tests need several devices.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
)

# pytest's workers share the GPUs: none may take the memory of one whole.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / workers:.3f}")

import jax
import pytest

from jax_kda import ffi, routing


def pytest_addoption(parser):
    parser.addoption("--big", action="store_true", help="also run tests that need many gigabytes or minutes")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--big"):
        skip = pytest.mark.skip(reason="needs --big")
        for item in items:
            if "big" in item.keywords:
                item.add_marker(skip)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := _no_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu():
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        return "no CUDA GPU in this process"
    return "" if ffi.build().cuda else f"no CUDA kernels: {ffi.build().reason}"


@pytest.fixture(autouse=True)
def _device(request):
    """Tests not marked `gpu` run on the CPU, whatever else is in the machine."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def cuda_build(monkeypatch):
    """An extension with code for every architecture, as far as routing can tell. Nothing of it can run."""
    build = routing.Build(cuda=True, architectures=("90a", "100a", "103a"), reason="pretended by a test")
    monkeypatch.setattr(ffi, "build", lambda: build)
    return build


@pytest.fixture
def no_cuda_build(monkeypatch):
    """No extension, whether or not one is installed."""
    build = routing.Build(cuda=False, reason="pretended to be absent by a test")
    monkeypatch.setattr(ffi, "build", lambda: build)
    return build
