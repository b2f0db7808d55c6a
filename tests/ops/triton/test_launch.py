# SPDX-License-Identifier: Apache-2.0
"""Launches by name: which compiled kernel they take, and what reaches the driver. No GPU: compiled kernels are made up here.

`test_compile.py` counts the parameters of real kernels.
"""

import ctypes
import functools
import itertools
import logging
import random
import struct
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cula.core.replay import record as native
from cula.core.replay.record import Address
from tests.support.replay import addresses

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs

from cula.ops.triton import launch
from cula.ops.triton.launch import Passed

FUNCTION, GRID, STREAM = 4242, 7, 2**40
# parameters: q, an absent tensor, o, strides (the last is 1, and so a constant), a long stride, scale, a constant, a flag
TYPES = ("*bf16", "constexpr", "*fp32", ("i32", "i64", "constexpr"), "i64", "fp32", "constexpr", "i1")
ARGUMENTS = (Passed(0), None, Passed(2), (-3, 2**40, 1), 2**35, 0.1, "bounded", True)
PTX = (
    ".visible .entry decode_kernel(\n"
    + ",\n".join(f".param .u64 p_{i}" for i in range(9))
    + "\n)\n.reqntid 64\n{ .param .b32 x; }"
)


def compiled(**metadata):
    usual = dict(num_warps=2, num_ctas=1, shared=300, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0)
    return types.SimpleNamespace(
        name="decode_kernel",
        function=FUNCTION,
        metadata=types.SimpleNamespace(**(usual | metadata)),
        src=types.SimpleNamespace(signature=dict(enumerate(TYPES))),
        asm={"ptx": PTX},
        run=None,
    )


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


@pytest.fixture
def driver(monkeypatch):
    """What cuLaunchKernelEx is called with."""
    calls = []

    def called(config, function, parameters, extra):
        kinds = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int8]
        at = (ctypes.c_void_p * 9).from_address(parameters)
        values = [kind.from_address(a).value for kind, a in zip([*kinds, ctypes.c_uint64, ctypes.c_uint64], at)]
        config = Config.from_buffer_copy(Config.from_address(config))
        attributes = [bytes((ctypes.c_char * 72).from_address(config.attributes + 72 * i)) for i in range(config.num_attributes)]
        calls.append((config, function, values, extra, attributes))
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(called)
    monkeypatch.setattr(launch, "_driver_function", lambda name: ctypes.cast(function, ctypes.c_void_p).value)
    calls.append(function)  # alive as long as the list
    return calls


@pytest.mark.parametrize("is_early", [False, True])
def test_the_driver_gets_the_kernels_parameters(driver, is_early):
    if native._compiled() is None:
        pytest.skip("native.c cannot be compiled here")
    q, o = torch.randn(8), torch.randn(8)
    frame = launch.frame(compiled(launch_pdl=is_early), GRID, ARGUMENTS)
    run = native.launcher((Address(0), Address(1), Address(~0)), print, frame)
    assert run(STREAM, addresses((q, None)), o)
    config, function, values, extra, attributes = driver[1]
    assert values == [q.data_ptr(), o.data_ptr(), -3, 2**40, 2**35, pytest.approx(0.1), 1, 0, 0]
    assert (function, extra) == (FUNCTION, None)
    grid, block = (config.gridx, config.gridy, config.gridz), (config.blockx, config.blocky, config.blockz)
    assert (grid, block, config.shared) == ((GRID, 1, 1), (64, 1, 1), 300)
    assert config.stream == STREAM
    if is_early:  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, to which 1 is given
        assert [struct.unpack("=IIQ56x", attribute) for attribute in attributes] == [(6, 0, 1)]
    else:
        assert config.attributes is None and not attributes


@pytest.mark.parametrize(
    "change",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
    ],
    ids=str,
)
def test_kernels_that_take_more_keep_tritons_launcher(driver, change):
    assert launch.frame(compiled(**change), GRID, ARGUMENTS) is None


def test_a_kernel_with_other_parameters_keeps_tritons_launcher(driver):
    kernel = compiled()
    for asm in ({"ptx": PTX.replace(".param .u64 p_8", "")}, {"cubin": b""}):  # the second's are not to be seen
        kernel.asm = asm
        assert launch.frame(kernel, GRID, ARGUMENTS) is None
    kernel = compiled()
    kernel.src.signature[5] = "bf16"
    assert launch.frame(kernel, GRID, ARGUMENTS) is None


def test_more_parameters_than_native_has_room_for_keep_tritons_launcher(driver):
    kernel, count = compiled(), launch.MAX_PARAMETERS
    kernel.src.signature = {i: "i32" for i in range(count)}
    entries = ",\n".join(f".param .u64 p_{i}" for i in range(count + launch.NUM_SCRATCH))
    kernel.asm = {"ptx": f".visible .entry decode_kernel(\n{entries}\n)"}
    assert launch.frame(kernel, Passed(0), [Passed(i + 1) for i in range(count)]) is None
    del kernel.src.signature[0], kernel.src.signature[1]
    kernel.asm = {"ptx": kernel.asm["ptx"].replace(".param .u64 p_0,", "").replace(".param .u64 p_1,", "")}
    frame = launch.frame(kernel, Passed(0), [Passed(i + 1) for i in range(count - 2)])
    native.launcher([Address(i) for i in range(count - 1)], print, frame)  # it has


def test_without_the_driver_there_is_tritons_launcher(monkeypatch):
    def fail(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert launch.frame(compiled(), GRID, ARGUMENTS) is None


# Launches by name


def function(q, k, o, q_strides, k_strides, N, T, scale, bias, K: tl.constexpr, GATE: tl.constexpr):
    """Never run."""


def make(numbers="N T", floats="scale bias", any_address="o"):
    return launch.kernel(numbers=numbers, floats=floats, any_address=any_address)(function)


class Compiled:
    """What Triton makes for one specialisation. Launched from Python: it is said to have a cluster, which C code does not do."""

    metadata = types.SimpleNamespace(num_ctas=2)
    src = types.SimpleNamespace(signature={})
    function, packed_metadata = FUNCTION, "packed"

    def __init__(self, launches):
        self.launches = launches

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (y, z, function, metadata, rest[:3]) == (1, 1, FUNCTION, "packed", (None, None, None))
        self.launches.append(("direct", self, x, stream, rest[3:]))


class Jit:
    """Triton's JIT: compiles for what `specialised` tells apart, and launches."""

    def __init__(self, device=lambda: 0, make=Compiled):
        self.compiled, self.launches, self.device, self.make = {}, [], device, make

    def __getitem__(self, grid):
        return functools.partial(self.run, grid[0])

    def run(self, grid, *arguments, **options):
        compiled = self.find(arguments)
        self.launches.append(("jit", compiled, grid, None, arguments))
        return compiled

    def find(self, arguments):
        return self.compiled.setdefault((self.device(), specialised(arguments)), self.make(self.launches))


def specialised(arguments):
    """What Triton tells apart of the arguments of `function`: by its own code where there is some."""
    *rest, K, GATE = arguments
    is_number = [False] * 5 + [True] * 4
    return (*(of(x, not plain, i != 2) for i, (x, plain) in enumerate(zip(rest, is_number))), K, GATE)


def of(x, is_specialised, is_aligned):
    try:
        from triton._C.libtriton import native_specialize_impl
        from triton.backends.nvidia.compiler import CUDABackend
    except ImportError:
        pytest.skip("this Triton specialises elsewhere")
    return native_specialize_impl(CUDABackend, x, False, is_specialised, is_aligned)


@pytest.fixture
def gpu(monkeypatch):
    """Tensors may be launched on; the device is number `device[0]`."""
    device = [0]
    monkeypatch.setattr(launch, "can_launch_directly", lambda kernel, first: launch.is_ready())
    monkeypatch.setattr(launch, "current_device", lambda: device[0])
    monkeypatch.setattr(launch, "current_stream", lambda device: STREAM)
    return device


def variant_of(device=(0,), **description):
    kernel = make(**description)
    kernel.jit = jit = Jit(lambda: device[0])
    return kernel.variant(K=32, GATE="log", num_warps=4), jit


def arguments(**changes):
    q, k, o = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    usual = dict(q=q, k=k, o=o, q_strides=(320, 64, 1), k_strides=(48, 5), N=3, T=64, scale=0.5, bias=1.0)
    return usual | changes


def moved(by):
    """A tensor whose address is no multiple of 16."""
    return torch.zeros(80)[by:][:64]


@pytest.mark.parametrize(
    ("numbers", "floats"),
    [("T N", "scale bias"), ("N T", "bias scale"), ("N scale", "T bias"), ("N k", "scale bias"), ("N T scale", "q bias")],
)
def test_a_description_with_two_names_swapped_is_refused(numbers, floats):
    with pytest.raises(TypeError, match=r"function takes q, k, o, .*; its description says"):
        make(numbers, floats)


def test_an_address_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="its description says"):
        make(any_address="N")


def test_names_are_checked_before_anything_is_launched(gpu):
    variant, jit = variant_of()
    good = arguments()
    with pytest.raises(TypeError, match="function wants T"):
        variant(GRID, **{n: x for n, x in good.items() if n != "T"})
    with pytest.raises(TypeError, match="function does not take t"):
        variant(GRID, **good, t=1)
    with pytest.raises(TypeError, match="function wants q and does not take Q"):
        variant(GRID, **{n.replace("q", "Q") if n == "q" else n: x for n, x in good.items()})
    with pytest.raises(TypeError, match="scale is 1; a float is needed"):
        variant(GRID, **good | {"scale": 1})
    with pytest.raises(TypeError):
        variant(GRID, **good | {"T": 1.5})
    variant(0, **good)
    assert not jit.launches


def test_constants_and_options_are_checked():
    kernel = make()
    with pytest.raises(TypeError, match="function wants constants GATE"):
        kernel.variant(K=32)
    with pytest.raises(TypeError, match="function has no constants or options BV"):
        kernel.variant(K=32, GATE="log", BV=1)
    assert kernel.variant(GATE="log", K=32, maxnreg=None, num_warps=4).options == {"num_warps": 4}


def test_a_launch_passes_arguments_in_the_kernels_order(gpu):
    variant, jit = variant_of()
    x = arguments(k=None)
    variant(GRID, **x)
    variant(GRID + 1, **dict(reversed([*(x | {"T": 1000, "scale": 2.0}).items()])))
    q, o, rest = x["q"], x["o"], ((320, 64, 1), (48, 5), 3)
    (how, first, *launched), (how_then, then, *launched_then) = jit.launches
    assert (how, how_then) == ("jit", "direct") and first is then
    assert launched == [GRID, None, (q, None, o, *rest, 64, 0.5, 1.0, 32, "log")]
    assert launched_then == [GRID + 1, STREAM, (q.data_ptr(), 0, o.data_ptr(), *rest, 1000, 2.0, 1.0, 32, "log")]


SAME = {
    "a length": {"T": 65},
    "a length of 1": {"T": 1},
    "a length that 16 divides": {"T": 1 << 20},
    "two lengths": {"T": 1, "N": 16},
    "a float": {"scale": 16.0},
    "other strides of a kind": {"q_strides": (640, 32, 1)},
    "other tensors": {"q": torch.ones(128)},
    "an address of a tensor that may be anywhere": {"o": moved(1)},
}
OTHER = {
    "the divisibility of a stride": {"q_strides": (320, 65, 1)},
    "a stride of 1": {"q_strides": (320, 1, 1)},
    "a stride that was 1": {"q_strides": (320, 64, 2)},
    "a long stride": {"q_strides": (2**35, 64, 1)},
    "a long length": {"T": 2**31},
    "a negative long length": {"T": -(2**35)},
    "an address": {"q": moved(1)},
    "another address": {"k": moved(2)},
    "a dtype": {"k": torch.zeros(64, dtype=torch.bfloat16)},
    "a tensor that is not there": {"k": None},
    "strides that are not there": {"k_strides": None},
    "their number": {"k_strides": (48, 5, 7)},
}


@pytest.mark.parametrize(("what", "is_same"), [*((w, True) for w in SAME), *((w, False) for w in OTHER)])
def test_which_launches_share_a_compiled_kernel(gpu, what, is_same):
    variant, jit = variant_of()
    variant(GRID, **arguments())
    for _ in range(2):
        variant(GRID, **arguments(**(SAME | OTHER)[what]))
    assert len({id(compiled) for _, compiled, *_ in jit.launches}) == (1 if is_same else 2)
    assert jit.launches[2][0] == "direct"


def test_a_new_length_is_launched_directly(gpu):
    variant, jit = variant_of()
    for T in (64, 1, 65, 4096, 100000):
        variant(GRID, **arguments(T=T, q_strides=(16 * T, 16, 1)))
    assert [how for how, *_ in jit.launches] == ["jit", *["direct"] * 4]


def test_a_device_has_kernels_of_its_own(gpu):
    variant, jit = variant_of(gpu)
    for device in (0, 1, 0, 1):
        gpu[0] = device
        variant(GRID, **arguments())
    (_, a, *_), (_, b, *_), (_, c, *_), (_, d, *_) = jit.launches
    assert a is c and b is d and a is not b
    assert [how for how, *_ in jit.launches] == ["jit", "jit", "direct", "direct"]


def any_arguments(rng):
    """Of all kinds that Triton tells apart, at random."""
    integers = [0, 1, 2, 5, 16, 48, -16, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**35, 2**35 + 1]
    strides = lambda: rng.choice([None, tuple(rng.choices(integers, k=rng.randint(1, 4)))])
    tensors = [None, torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), moved(1), moved(2), moved(4)]
    q, k, o = (rng.choice(tensors) for _ in range(3))
    q = torch.zeros(8) if q is None and k is None and o is None else q
    numbers = dict(N=rng.choice(integers), T=rng.choice(integers), scale=rng.random(), bias=rng.random())
    return dict(q=q, k=k, o=o, q_strides=strides(), k_strides=strides(), **numbers)


def test_a_launch_never_takes_a_kernel_that_triton_compiled_for_others(gpu):
    variant, jit = variant_of()
    rng = random.Random(0)
    seen = [any_arguments(rng) for _ in range(300)]
    for x in [*seen, *seen]:
        before = len(jit.launches)
        variant(GRID, **x)
        ((_, compiled, *_),) = jit.launches[before:]
        assert compiled is jit.find((*variant.kernel.in_order(x), 32, "log"))
    assert [how for how, *_ in jit.launches[300:]] == ["direct"] * 300


def test_a_profilers_hooks_hear_of_launches(gpu):
    variant, jit = variant_of()
    variant(GRID, **arguments())
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if not hasattr(hook, "add"):
            pytest.skip("hooks of this Triton are no chains")
        hook.add(print)
        try:
            variant(GRID, **arguments())
        finally:
            hook.remove(print)
    variant(GRID, **arguments())
    assert [how for how, *_ in jit.launches] == ["jit", "jit", "jit", "direct"]


def test_without_compiled_launchers_there_is_tritons_jit(gpu, caplog):
    variant, jit = variant_of()
    jit.make = lambda launches: types.SimpleNamespace(run=None)
    launch._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="cula"):
        for T in (1, 2**40, 3):
            variant(GRID, **arguments(T=T))
    assert [how for how, *_ in jit.launches] == ["jit"] * 3
    assert [r.message for r in caplog.records if "launches go through its JIT" in r.message] == [caplog.records[0].message]


def test_tensors_that_are_not_on_a_gpu_go_through_tritons_jit():
    variant, jit = variant_of()
    for _ in range(2):
        variant(GRID, **arguments())
    assert [how for how, *_ in jit.launches] == ["jit", "jit"]


def test_many_threads_share_a_variant(gpu):
    variant, jit = variant_of()
    cases = [
        arguments(q_strides=s, k=k) for s, k in itertools.product([(1,), (16,), (3, 3), None], [None, torch.zeros(8), moved(1)])
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: variant(i + 1, **cases[i % len(cases)]), range(600)))
    for how, compiled, grid, _, given in jit.launches:
        x = variant.kernel.in_order(cases[(grid - 1) % len(cases)])
        assert compiled is jit.find((*x, 32, "log"))
        assert how == "jit" or given[3:] == (*x[3:], 32, "log")
    assert sorted(grid for _, _, grid, *_ in jit.launches) == list(range(1, 601))


# The same from C

FUNCTION_TYPES = ("*fp32", "constexpr", "*fp32", ("i32", "i32", "constexpr"), ("i32", "i64"), "i32", "i32", "fp32", "fp32")


class FromC(Compiled):
    """One of the usual kind."""

    def __init__(self, launches, status=0):
        super().__init__(launches)
        usual = compiled()
        self.name, self.metadata = usual.name, usual.metadata
        self.src = types.SimpleNamespace(signature=dict(enumerate((*FUNCTION_TYPES, "constexpr", "constexpr"))))
        entries = ",\n".join(f".param .u64 p_{i}" for i in range(10 + launch.NUM_SCRATCH))
        self.asm = {"ptx": f".visible .entry decode_kernel(\n{entries}\n)"}


@pytest.mark.parametrize("status", [0, 1])
def test_a_launch_from_c(gpu, monkeypatch, status):
    if native._compiled() is None:
        pytest.skip("native.c cannot be compiled here")
    kinds = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        *[ctypes.c_int32] * 3,
        ctypes.c_int64,
        *[ctypes.c_int32] * 2,
        *[ctypes.c_float] * 2,
    ]
    calls = []

    def called(config, function, parameters, extra):
        at = (ctypes.c_void_p * (len(kinds) + launch.NUM_SCRATCH)).from_address(parameters)
        config = Config.from_buffer_copy(Config.from_address(config))
        calls.append(
            ((config.gridx, config.gridy, config.gridz), config.stream, [k.from_address(a).value for k, a in zip(kinds, at)])
        )
        return status

    pointer = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(called)
    monkeypatch.setattr(launch, "_driver_function", lambda name: ctypes.cast(pointer, ctypes.c_void_p).value)
    variant, jit = variant_of()
    jit.make = FromC
    x = arguments(k=None, k_strides=(48, -(2**33)), T=1000, N=-2)
    variant(GRID, **x)
    variant(GRID + 1, **x | {"T": 7, "scale": 2.0})
    want = [x["q"].data_ptr(), x["o"].data_ptr(), 320, 64, 48, -(2**33), -2, 7, 2.0, 1.0]
    assert calls == [((GRID + 1, 1, 1), STREAM, want)]
    assert [how for how, *_ in jit.launches] == (["jit"] if status == 0 else ["jit", "jit"])  # Triton says why, if it fails too
