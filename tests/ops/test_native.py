# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors and launching for a plan: in C, and the same in Python."""

import ctypes
import logging
import struct
import threading

import pytest
import torch

from cula.ops import native
from cula.ops.native import Address, Frame


def tensors():
    return torch.randn(3, 4), None, torch.randn(4)


@pytest.fixture
def in_c():
    if native._compiled() is None:
        pytest.skip("native.c cannot be compiled here")


@pytest.fixture
def in_python(monkeypatch):
    if native.TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")
    monkeypatch.setattr(native, "_compiled", lambda: None)


@pytest.fixture(params=["c", "python"])
def way(request):
    request.getfixturevalue(f"in_{request.param}")


CHANGES = {
    "shape": lambda a, b, c: (a[:2], b, c),
    "strides": lambda a, b, c: (a.t().contiguous().t(), b, c),
    "strides of a single row": lambda a, b, c: (a, b, c.expand(1, 4)),
    "dtype": lambda a, b, c: (a.double(), b, c),
    "dtype of as many bytes": lambda a, b, c: (a.int(), b, c),
    "device": lambda a, b, c: (a, b, c.to("meta")),
    "one more": lambda a, b, c: (a, c, c),
    "one less": lambda a, b, c: (a, b, None),
    "another place": lambda a, b, c: (a, c, None),
    "type": lambda a, b, c: (a, b, torch.nn.Parameter(c, requires_grad=False)),
    "no tensor": lambda a, b, c: (a, b, [1.0] * 4),
    "gradient": lambda a, b, c: (a.requires_grad_(), b, c),
}


@pytest.mark.parametrize("change", CHANGES)
def test_likeness_is_lost_with_any_change(way, change):
    is_like, others = native.likeness(tensors()), tensors()
    assert is_like(others) == native.addresses(others)
    assert is_like(CHANGES[change](*others)) is None


def test_addresses(in_c):
    a, _, c = given = torch.randn(3, 4)[1:], None, torch.randn(4)
    assert struct.unpack("3Q", native.addresses(given)) == (a.data_ptr(), 0, c.data_ptr()) == native._addresses(given)
    with pytest.raises(TypeError, match="expected a tensor, not list"):
        native.addresses(([1.0],))


def test_without_gradients_it_does_not_matter_who_requires_them(in_c):
    is_like = native.likeness(tensors())
    others = torch.randn(3, 4, requires_grad=True), None, torch.randn(4)
    assert is_like(others) is None
    with torch.no_grad():
        assert is_like(others) is not None
    with torch.inference_mode():
        assert is_like(tensors()) is not None


def test_tensors_without_memory_are_like_none(in_c):
    """Inside of a transform a tensor looks like any other and has no address."""
    is_like = native.likeness(tensors())
    seen = []
    c = torch.randn(4)
    torch.vmap(lambda a: seen.append(is_like((a, None, c))) or a)(torch.randn(2, 3, 4))
    assert seen == [None]


def test_the_strides_of_a_single_row_are_compared_as_they_are(in_c):
    wide, narrow = torch.empty_strided((1, 4), (99, 1)), torch.empty_strided((1, 4), (4, 1))
    assert native.likeness((wide,))((narrow,)) is None


# Launches

STREAM, FAILED = 2**63 + 5, 7
OF = (Address(0, 16), Address(2), Address(1, absent=99), Address(~0, 16), Address(~1, absent=98))


class Recorder:
    """A function of four words, in C's eyes: the first is a number, the second points to a stream and five addresses."""

    def __init__(self, status=0, wait=lambda: None):
        self.calls, self.status, self.wait = [], status, wait
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(self.called)

    def called(self, *words):
        seen = [*words[:1], *words[2:], *(ctypes.c_uint64 * 6).from_address(words[1])]
        self.wait()
        assert seen[3:] == [*(ctypes.c_uint64 * 6).from_address(words[1])], "another call wrote into this one's block"
        self.calls.append(seen)
        return self.status

    def plain(self, stream, *addresses):
        self.calls.append([11, 12, 13, stream, *addresses])

    def launcher(self):
        block = struct.pack("4Q", 11, 0, 12, 13) + struct.pack("6Q", 0, *(a.absent for a in OF))
        places = tuple((i, 40 + 8 * i) for i in range(5))
        at = ctypes.cast(self.function, ctypes.c_void_p).value
        return native.launcher(OF, self.plain, Frame(at, block, ((8, 32),), 32, places, self))


def test_a_launch_passes_addresses_on(way):
    recorder, given = Recorder(), tensors()
    launch, o = recorder.launcher(), torch.randn(2)
    assert launch(STREAM, native.addresses(given), o, None) is True
    a, _, c = given
    assert recorder.calls == [[11, 12, 13, STREAM, a.data_ptr(), c.data_ptr(), 99, o.data_ptr(), 98]]
    assert launch(STREAM, native.addresses((a, o, c)), a, c) is True
    assert recorder.calls[1:] == [[11, 12, 13, STREAM, a.data_ptr(), c.data_ptr(), o.data_ptr(), a.data_ptr(), c.data_ptr()]]


def test_an_address_that_will_not_do(way):
    recorder, (a, _, c) = Recorder(), tensors()
    launch, odd = recorder.launcher(), torch.randn(9)[1:]
    assert odd.data_ptr() % 16
    assert launch(0, native.addresses((odd, None, c)), a, None) is False
    assert launch(0, native.addresses((a, None, c)), odd, None) is False
    assert not recorder.calls
    assert launch(0, native.addresses((a, odd, odd)), a, odd) is True


def test_a_launch_that_fails(in_c):
    launch, given = Recorder(FAILED).launcher(), tensors()
    assert launch(0, native.addresses(given), given[0], None) is False


def test_a_launch_without_a_frame_takes_addresses_from_c(in_c):
    recorder, given = Recorder(), tensors()
    launch = native.launcher(OF, recorder.plain, None)
    assert launch(STREAM, native.addresses(given), given[0], None) is True
    assert recorder.calls[0][3:6] == [STREAM, given[0].data_ptr(), given[2].data_ptr()]


def test_threads_share_a_launch(in_c):
    """Both are inside of the function at once, each with its own addresses."""
    barrier = threading.Barrier(2, timeout=20)
    recorder = Recorder(wait=barrier.wait)
    launch, given, results = recorder.launcher(), [tensors(), tensors()], []

    def work(i):
        results.append(launch(i, native.addresses(given[i]), given[i][0], None))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]
    want = [[11, 12, 13, i, a.data_ptr(), c.data_ptr(), 99, a.data_ptr(), 98] for i, (a, _, c) in enumerate(given)]
    assert sorted(recorder.calls, key=lambda seen: seen[3]) == want


@pytest.mark.parametrize(
    "wrong",
    [
        {"block": bytes(24)},
        {"block": bytes(5000)},
        {"pointers": ((60, 0),)},
        {"pointers": ((-8, 0),)},
        {"stream": 57},
        {"places": ((0, 64),)},
    ],
    ids=str,
)
def test_frames_that_reach_outside_of_their_block(in_c, wrong):
    frame = Frame(1, bytes(64), ((8, 32),), 32, ((0, 40),), None)
    native.launcher(OF, print, frame)
    with pytest.raises(ValueError, match=r"block"):
        native.launcher(OF, print, frame._replace(**wrong))


def test_a_call_with_too_few_tensors(in_c):
    launch, (a, _, _) = Recorder().launcher(), tensors()
    with pytest.raises(TypeError, match="no tensor number 2"):
        launch(0, native.addresses((a, None)), a, None)
    with pytest.raises(TypeError, match="no tensor number -2"):
        launch(0, native.addresses(tensors()), a)


def test_what_cannot_be_compiled_is_said_once_and_done_without(monkeypatch, caplog):
    build = pytest.importorskip("triton.runtime.build")

    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "compile_module_from_src", fail)
    with caplog.at_level(logging.INFO, logger="cula"):
        assert native._compiled.__wrapped__() is None
    assert "Failed to find C compiler" in caplog.text
