# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures. Backend-neutral test bodies take `backend`; adding a backend to the dispatch table adds its tests.

Without a GPU, Triton kernels run in Triton's interpreter, which must be switched on before triton is first imported.
"""

import gc
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the PTX interpreter's products are small

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:  # a kernel that never ran on hardware and is off shall fail its tests there, not be declined
    os.environ.setdefault("CULA_SELF_CHECK", "0")
else:
    os.environ["TRITON_INTERPRET"] = "1"

from cula.core.dispatch import BACKENDS  # noqa: E402
from tests.support import once  # noqa: E402

LONG = ("test_ranks.py", "test_on_gpu.py") if HAS_GPU else ("test_compile.py",)


def pytest_collection_modifyitems(config, items):
    """`gpu` marks tests that need one; every test that takes a backend runs on the GPU where there is one.

    What compiles most kernels or starts processes comes first, so that no worker is left alone with it at the end (on a GPU:
    `pytest -m gpu -n 14 --maxschedchunk 1`).
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if "backend" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu) if HAS_GPU else None
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish(session):
    """Thousands of tests and their modules stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_worker():
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def room_for_other_workers():
    """What torch keeps of a test's memory, the others on the same GPU would lack: float64 references take gigabytes."""
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def shared_by_workers(tmp_path_factory):
    if os.environ.get("PYTEST_XDIST_WORKER"):
        once.folder = tmp_path_factory.getbasetemp().parent


@pytest.fixture(scope="session")
def _triton_interpreter():
    from tests.support import triton_interpreter

    triton_interpreter.apply()


@pytest.fixture(params=[b.name for b in BACKENDS])
def backend(request) -> str:
    """The name of a backend that this machine can run, GPU or not."""
    chosen = next(b for b in BACKENDS if b.name == request.param)
    reason = chosen.missing()
    if reason is not None:
        pytest.skip(reason)
    if chosen.name == "triton" and not HAS_GPU:
        request.getfixturevalue("_triton_interpreter")
    elif chosen.device == "cuda" and not HAS_GPU:
        pytest.skip("needs an NVIDIA GPU")
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A call that the hand-tuned backend under test declines skips its test, with the backend's own sentence. The portable ones
    serve every test: for them to decline is a failure."""
    try:
        return (yield)
    except NotImplementedError as error:
        backend = pyfuncitem.funcargs.get("backend")
        if backend is None or not backend.startswith("cute") or f"no backend can serve this call. {backend}: " not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
