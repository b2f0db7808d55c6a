# SPDX-License-Identifier: Apache-2.0
"""Repeated calls in C, and the same in Python."""

import ctypes
import logging
import struct
import sys
import threading

import pytest
import torch

from cula.core.replay import record
from cula.core.replay.record import Address, Frame, LaunchRecord
from tests.support.replay import addresses, replay_on_cpu


def tensors():
    return torch.randn(3, 4), None, torch.randn(4)


@pytest.fixture
def in_c():
    if record._compiled() is None:
        pytest.skip("native.c cannot be compiled here")


@pytest.fixture
def in_python(monkeypatch):
    monkeypatch.setattr(record, "_compiled", lambda: None)


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
    "alignment": lambda a, b, c: (a, b, torch.randn(5)[1:]),
    "type": lambda a, b, c: (a, b, torch.nn.Parameter(c, requires_grad=False)),
    "no tensor": lambda a, b, c: (a, b, [1.0] * 4),
    "gradient": lambda a, b, c: (a.requires_grad_(), b, c),
}


@pytest.mark.parametrize("change", CHANGES)
def test_guard_is_lost_with_any_change(way, change):
    is_like, others = record.guard(tensors()), tensors()
    assert is_like(others) == addresses(others)
    assert is_like(CHANGES[change](*others)) is None


def test_addresses(in_c):
    a, _, c = given = torch.randn(3, 4)[1:], None, torch.randn(4)
    assert struct.unpack("3Q", addresses(given)) == (a.data_ptr(), 0, c.data_ptr()) == record._addresses(given)
    with pytest.raises(TypeError, match="expected a tensor, not list"):
        record.guard(([1.0],))
    with pytest.raises(TypeError, match="takes a tuple of tensors"):
        record.guard(given)(list(given))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
def test_small_tensors(way, shape):
    t = torch.ones(shape)
    is_like = record.guard((t,))
    assert is_like((torch.ones(shape),)) is not None
    assert is_like((torch.ones(2, 5),)) is None


def test_without_gradients_it_does_not_matter_who_requires_them(in_c):
    is_like = record.guard(tensors())
    others = torch.randn(3, 4, requires_grad=True), None, torch.randn(4)
    assert is_like(others) is None
    with torch.no_grad():
        assert is_like(others) is not None
    with torch.inference_mode():
        assert is_like(tensors()) is not None


def test_tensors_without_memory_are_like_none(in_c):
    """Inside of a transform a tensor looks like any other and has no address."""
    is_like = record.guard(tensors())
    seen = []
    a, c = torch.randn(3, 4), torch.randn(4)

    def look(a):
        seen.append(is_like((a, None, c)))
        return a.sum()

    torch.vmap(look)(torch.randn(2, 3, 4))
    torch.func.functionalize(look)(a)
    torch.func.grad(look)(a)
    assert seen == [None] * 3
    a.untyped_storage().resize_(0)
    assert is_like((a, None, c)) is None


def test_a_tensor_may_come_twice(way):
    a = torch.randn(4)
    assert record.guard((a, a))((a, a)) is not None
    again = record.guard((a, a))
    assert again((a, torch.randn(4))) is not None
    assert again((a, torch.randn(5))) is None


def test_fake_tensors_are_like_none(in_c):
    from torch._subclasses import FakeTensorMode

    is_like = record.guard(tensors())
    with FakeTensorMode():
        assert is_like(tensors()) is None


def test_a_tensor_that_stands_for_its_negative(in_c):
    """`imag` of a conjugate shares memory with what it is the negative of."""
    z = torch.randn(4, dtype=torch.complex64)
    is_like = record.guard((z.imag,))
    assert is_like((z.imag,)) is not None
    assert z.conj().imag.is_neg() and is_like((z.conj().imag,)) is None
    assert record.guard((torch.randn(8)[::2],))((torch.randn(8)[::2],)) is not None


def test_the_strides_of_a_single_row_are_compared_as_they_are(in_c):
    wide, narrow = torch.empty_strided((1, 4), (99, 1)), torch.empty_strided((1, 4), (4, 1))
    assert record.guard((wide,))((narrow,)) is None


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

    def plain(self, stream, numbers, *addresses):
        self.calls.append([11, 12, 13, stream, *addresses, *numbers])

    def launcher(self):
        block = struct.pack("4Q", 11, 0, 12, 13) + struct.pack("6Q", 0, *(a.absent for a in OF))
        places = tuple((i, 40 + 8 * i) for i in range(5))
        at = ctypes.cast(self.function, ctypes.c_void_p).value
        return record.launcher(OF, self.plain, Frame(at, block, ((8, 32),), 32, places, self))


def test_a_launch_passes_addresses_on(way):
    recorder, given = Recorder(), tensors()
    launch, o = recorder.launcher(), torch.randn(2)
    assert launch(STREAM, addresses(given), o, None) is True
    a, _, c = given
    assert recorder.calls == [[11, 12, 13, STREAM, a.data_ptr(), c.data_ptr(), 99, o.data_ptr(), 98]]
    assert launch(STREAM, addresses((a, o, c)), a, c) is True
    assert recorder.calls[1:] == [[11, 12, 13, STREAM, a.data_ptr(), c.data_ptr(), o.data_ptr(), a.data_ptr(), c.data_ptr()]]


def test_an_address_that_will_not_do(way):
    recorder, (a, _, c) = Recorder(), tensors()
    launch, odd = recorder.launcher(), torch.randn(9)[1:]
    assert odd.data_ptr() % 16
    assert launch(0, addresses((odd, None, c)), a, None) is False
    assert launch(0, addresses((a, None, c)), odd, None) is False
    assert not recorder.calls
    assert launch(0, addresses((a, odd, odd)), a, odd) is True


def test_a_launch_that_fails(in_c):
    launch, given = Recorder(FAILED).launcher(), tensors()
    assert launch(0, addresses(given), given[0], None) is False


def test_a_launch_without_a_frame_takes_addresses_from_c(in_c):
    recorder, given = Recorder(), tensors()
    launch = record.launcher(OF, recorder.plain, None)
    assert launch(STREAM, addresses(given), given[0], None) is True
    assert recorder.calls[0][3:6] == [STREAM, given[0].data_ptr(), given[2].data_ptr()]


def test_threads_share_a_launch(in_c):
    """Both are inside of the function at once, each with its own addresses."""
    barrier = threading.Barrier(2, timeout=20)
    recorder = Recorder(wait=barrier.wait)
    launch, given, results = recorder.launcher(), [tensors(), tensors()], []

    def work(i):
        results.append(launch(i, addresses(given[i]), given[i][0], None))

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
    record.launcher(OF, print, frame)
    with pytest.raises(ValueError, match=r"block"):
        record.launcher(OF, print, frame._replace(**wrong))


def test_a_call_with_too_few_tensors(in_c):
    launch, (a, _, _) = Recorder().launcher(), tensors()
    with pytest.raises(TypeError, match="no tensor number 2"):
        launch(0, addresses((a, None)), a, None)
    with pytest.raises(TypeError, match="no tensor number -2"):
        launch(0, addresses(tensors()), a)


# Records

MADE = ((2, 3), (3, 1), torch.float32)


@pytest.fixture
def on_cpu(monkeypatch):
    replay_on_cpu(monkeypatch, device=1, stream=STREAM)


def launch_record(*recorders, **changes):
    return LaunchRecord(1, tuple(r.launcher() for r in recorders), (MADE, None), **changes)


def test_a_record_makes_outputs_and_launches(way, on_cpu):
    given, recorders = tensors(), (Recorder(), Recorder())
    again = record.replayer(given, launch_record(*recorders))
    a, _, c = others = tensors()
    o, nothing = again(others)
    assert o.shape == (2, 3) and o.stride() == (3, 1) and nothing is None
    for recorder in recorders:
        assert recorder.calls == [[11, 12, 13, STREAM, a.data_ptr(), c.data_ptr(), 99, o.data_ptr(), 98]]
    assert again(others)[0] is not o


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_is_not_for_other_tensors(way, on_cpu, change):
    recorder = Recorder()
    again = record.replayer(tensors(), launch_record(recorder))
    assert again(CHANGES[change](*tensors())) is NotImplemented
    assert not recorder.calls


def test_an_output_may_be_a_tensor_of_the_call(way, on_cpu):
    given, recorder = tensors(), Recorder()
    made = record.replayer(given, launch_record(recorder)._replace(outputs=(0, 1, 2)))(given)
    assert len(made) == 3 and all(m is t for m, t in zip(made, given))
    assert recorder.calls[0][7:] == [given[0].data_ptr(), 98]


def test_a_workspace_is_one_more_output(way, on_cpu):
    given, recorder, asked = tensors(), Recorder(), []
    memory = torch.empty(64, dtype=torch.uint8)
    again = record.replayer(
        given, launch_record(recorder, workspace=lambda stream: asked.append(stream) or memory)._replace(outputs=(MADE,))
    )
    (o,) = again(given)
    assert asked == [STREAM]
    assert recorder.calls[0][7:] == [o.data_ptr(), memory.data_ptr()]


def test_launches_that_are_not_made(way, on_cpu):
    given, (first, second) = tensors(), (Recorder(), Recorder())
    ready = [True]
    again = record.replayer(given, launch_record(first, second, is_ready=lambda: ready[0]))
    odd = torch.randn(13)[1:].view(3, 4)
    assert again((odd, None, given[2])) is NotImplemented
    assert record.replayer((odd, None, given[2]), launch_record(first))((odd, None, given[2])) is None, (
        "its launches want other addresses"
    )
    assert not first.calls and again(given) is not None
    ready[0] = False
    assert again(given) is None
    assert len(first.calls) == len(second.calls) == 1


def test_a_launch_that_fails_is_the_last(in_c, on_cpu):
    first, second = Recorder(FAILED), Recorder()
    given = tensors()
    assert record.replayer(given, launch_record(first, second))(given) is None
    assert len(first.calls) == 1 and not second.calls


def test_on_another_device(way, on_cpu, monkeypatch):
    current, entered = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            current[0] = self.index

        def __exit__(self, *_):
            current[0] = 0

    monkeypatch.setattr(record, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    given, recorder = tensors(), Recorder()
    again = record.replayer(given, launch_record(recorder))
    assert again(given) is not None and again(given) is not None
    assert entered == [1, 1] and len(recorder.calls) == 2


@pytest.mark.parametrize("what", ["is_ready", "workspace", "current_device", "current_stream", "empty"])
def test_exceptions_come_through(way, on_cpu, monkeypatch, what):
    def fail(*_):
        raise MemoryError(what)

    changes = {what: fail} if what in LaunchRecord._fields else {}
    if not changes:
        monkeypatch.setattr(record, what, fail)
    given, recorder = tensors(), Recorder()
    again = record.replayer(given, launch_record(recorder, **changes))
    for _ in range(3):
        with pytest.raises(MemoryError, match=what):
            again(given)
    assert not recorder.calls


def test_nothing_is_held_on_to(way, on_cpu):
    given, recorder = tensors(), Recorder()
    memory = torch.empty(64, dtype=torch.uint8)
    again = record.replayer(given, launch_record(recorder, workspace=lambda stream: memory)._replace(outputs=(MADE, 1)))
    ready = record.replayer(given, launch_record(Recorder(), is_ready=lambda: False))
    calls = (again, record.replayer(given, launch_record(Recorder())), ready, record.guard(given))
    watched = (*given, memory, MADE, NotImplemented, *calls)
    for _ in range(2):
        before = [sys.getrefcount(x) for x in watched]
        for _ in range(50):
            for call in calls:
                call(given)
                call((given[0], None, given[0]))
        after = [sys.getrefcount(x) for x in watched]
    assert max(abs(b - a) for a, b in zip(before, after)) < 10
    o, _ = again(given)
    assert sys.getrefcount(o) == 2


def test_functions_of_python_are_records_too(way):
    given = tensors()
    again = record.replayer(given, lambda others: others)
    assert again(given) is given
    assert again((given[0], None, None)) is NotImplemented


def test_the_first_that_has_the_words(way):
    first = record.finder()
    say = lambda what: lambda tensors: (what, tensors)
    pass_on = lambda tensors: NotImplemented
    known = ((("a", 1.0), pass_on), (("b", 1.0), say(1)), (("a", 1.0), say(2)), (("a", 1.0), say(3)))
    assert first(known, "tensors", ("a", 1)) == (2, "tensors")
    assert first(known, "tensors", ("b", 1.0)) == (1, "tensors")
    assert first(known, "tensors", ("c", 1.0)) is NotImplemented
    assert first((), "tensors", ()) is NotImplemented
    with pytest.raises(ZeroDivisionError):
        first((((), lambda tensors: 1 / 0),), "tensors", ())


@pytest.mark.parametrize(
    "wrong", [{"outputs": (MADE,) * 11}, {"launches": (print,)}, {"outputs": (7,)}, {"outputs": ("o",)}], ids=str
)
def test_launch_records_that_make_no_sense(in_c, on_cpu, wrong):
    given, parts = tensors(), launch_record(Recorder())._replace(**wrong)
    functions = lambda: 1, lambda device: 0, record.empty, print
    with pytest.raises((TypeError, ValueError)):
        record._compiled().Record(record.guard(given), parts.launches, parts.outputs, None, None, 1, *functions, None)(given)


def test_what_cannot_be_compiled_is_said_once_and_done_without(monkeypatch, caplog):
    build = pytest.importorskip("triton.runtime.build")

    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "compile_module_from_src", fail)
    with caplog.at_level(logging.INFO, logger="cula"):
        assert record._compiled.__wrapped__() is None
    assert "Failed to find C compiler" in caplog.text


# Records for calls of other sizes: x [B, T, 4] and o like it, offsets [N + 1], all of int64 words in C's eyes.

LABELS = ((1, 2, 0), (-3,), None)


class SizedRecorder:
    """A function that sees the address of x and two numbers, of which the first is written in 8 bytes and the second in 4."""

    def __init__(self):
        self.calls = []
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(self.called)

    def called(self, *words):
        self.calls.append(list((ctypes.c_uint64 * 4).from_address(words[1])))
        return 0

    def plain(self, stream, numbers, *addresses):
        self.calls.append([stream, *addresses, *numbers])

    def launcher(self):
        block = struct.pack("4Q", 0, 0, 0, 0) + struct.pack("4Q", 0, 0, 99, 98)
        at = ctypes.cast(self.function, ctypes.c_void_p).value
        return record.launcher(
            (Address(0),), self.plain, Frame(at, block, ((8, 32),), 32, ((0, 40),), self, ((0, 48, 8), (1, 56, 4)))
        )


def sized(B, T, N):
    return torch.randn(B, T, 4), torch.zeros(N + 1, dtype=torch.int32), torch.randn(3)


def sized_record(recorder, asked):
    def resize(B, T, N):
        asked.append((B, T, N))
        return None if T > 100 else record.Resized((B * T, N), (((B, T, 4), (4 * T, 4, 1), torch.float32),), None)

    outputs = (((2, 5, 4), (20, 4, 1), torch.float32),)
    return LaunchRecord(1, (recorder.launcher(),), outputs, sizes=record.Sizes(LABELS, resize))


def test_one_record_serves_every_length(way, on_cpu):
    recorder, asked, given = SizedRecorder(), [], sized(2, 5, 3)
    again = record.replayer(given, sized_record(recorder, asked))
    for B, T, N in ((2, 5, 3), (2, 5, 3), (1, 7, 1), (3, 1, 9), (2, 5, 3)):
        x, *rest = sized(B, T, N)
        (o,) = again((x, *rest))
        assert o.shape == (B, T, 4)
        assert recorder.calls.pop() == [STREAM, x.data_ptr(), B * T, N]
    assert again(sized(2, 101, 3)) is NotImplemented, "for another record"
    assert again(sized(2, 101, 3)) is NotImplemented
    assert asked == [(2, 5, 3), (1, 7, 1), (3, 1, 9), (2, 101, 3)], "once each"


OTHERS = {
    "another fixed size": lambda x, cu, p: (torch.randn(2, 5, 5), cu, p),
    "another fixed tensor": lambda x, cu, p: (x, cu, torch.randn(4)),
    "a batch that is not flat": lambda x, cu, p: (torch.randn(2, 9, 4)[:, :5], cu, p),
    "tokens further apart": lambda x, cu, p: (torch.randn(2, 5, 8)[..., :4], cu, p),
    "no offsets at all": lambda x, cu, p: (x, cu[:0], p),
    "a gradient": lambda x, cu, p: (x.requires_grad_(), cu, p),
    "another dtype": lambda x, cu, p: (x, cu.long(), p),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_record_for_every_length_is_not_for_other_tensors(way, on_cpu, what):
    recorder, asked = SizedRecorder(), []
    again = record.replayer(sized(2, 5, 3), sized_record(recorder, asked))
    assert again(OTHERS[what](*sized(2, 5, 3))) is NotImplemented
    assert not recorder.calls
    assert again(sized(4, 6, 2)) is not NotImplemented


def test_packed_tokens_have_the_stride_of_a_batch_of_one(way, on_cpu):
    made = LaunchRecord(1, (), (), sizes=record.Sizes(((0, 1, 0),), lambda n: record.Resized((), (), None)))
    again = record.replayer((torch.randn(1, 5, 4),), made)
    assert again((torch.randn(1, 9, 4),)) == ()
    assert again((torch.randn(2, 9, 4),)) is NotImplemented


def test_sizes_with_one_label_are_one_size(way, on_cpu):
    given = torch.randn(3, 4), torch.randn(3, 2)
    made = LaunchRecord(1, (), (), sizes=record.Sizes(((1, 0), (1, 0)), lambda n: record.Resized((), (), None)))
    again = record.replayer(given, made)
    assert again((torch.randn(5, 4), torch.randn(5, 2))) == ()
    assert again((torch.randn(5, 4), torch.randn(6, 2))) is NotImplemented


@pytest.mark.parametrize("labels", [((1,), None, None), (None,), ((9, 0, 0), None, None), "x"], ids=str)
def test_labels_that_make_no_sense(in_c, labels):
    with pytest.raises((TypeError, ValueError)):
        record.guard(sized(2, 5, 3), labels)


@pytest.mark.parametrize("resized", [3, (), ((1,), (), None), (("x",), (None,), None)], ids=str)
def test_resizing_that_makes_no_sense(in_c, on_cpu, resized):
    made = sized_record(SizedRecorder(), [])
    again = record.replayer(sized(2, 5, 3), made._replace(sizes=record.Sizes(LABELS, lambda *sizes: resized)))
    with pytest.raises(TypeError):
        again(sized(2, 5, 3))
