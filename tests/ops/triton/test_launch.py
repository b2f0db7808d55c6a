# SPDX-License-Identifier: Apache-2.0
"""A launch by the driver gets what Triton's launcher would pass to it. `test_compile.py` counts parameters of real kernels."""

import ctypes
import struct
import types

import pytest
import torch

from cula.core.replay import record as native
from cula.core.replay.record import Address
from tests.support.plans import addresses

pytest.importorskip("triton")

from cula.ops.triton import launch

FUNCTION, GRID, STREAM = 4242, 7, 2**40
# parameters: q, an absent tensor, o, strides (the last is 1, and so a constant), a long stride, scale, a constant, a flag
TYPES = ("*bf16", "constexpr", "*fp32", ("i32", "i64", "constexpr"), "i64", "fp32", "constexpr", "i1")
REST = ((-3, 2**40, 1), 2**35, 0.1, "bounded", True)
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
    frame = launch.frame(compiled(launch_pdl=is_early), GRID, (q, None, o), REST)
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
    assert launch.frame(compiled(**change), GRID, (torch.randn(8), None, torch.randn(8)), REST) is None


def test_a_kernel_with_other_parameters_keeps_tritons_launcher(driver):
    kernel = compiled()
    for asm in ({"ptx": PTX.replace(".param .u64 p_8", "")}, {"cubin": b""}):  # the second's are not to be seen
        kernel.asm = asm
        assert launch.frame(kernel, GRID, (torch.randn(8), None, torch.randn(8)), REST) is None
    kernel = compiled()
    kernel.src.signature[5] = "bf16"
    assert launch.frame(kernel, GRID, (torch.randn(8), None, torch.randn(8)), REST) is None


def test_without_the_driver_there_is_tritons_launcher(monkeypatch):
    def fail(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert launch.frame(compiled(), GRID, (torch.randn(8), None, torch.randn(8)), REST) is None
