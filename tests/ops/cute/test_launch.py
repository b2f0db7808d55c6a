# SPDX-License-Identifier: Apache-2.0
"""Calling a tvm-ffi function around its Python side."""

import pytest
import torch

from cula.core.replay import record
from cula.core.replay.record import Address
from cula.ops.cute import launch
from cula.ops.cute.abi import Abi, f32, i32, i64
from cula.ops.cute.abi import addresses as addresses_of
from cula.ops.cute.launch import Launch, Operand
from tests.support.replay import addresses

tvm_ffi = pytest.importorskip("tvm_ffi")

OF = (Address(0, 16), Address(1, absent=2**40 + 8), Address(~0))
NUMBERS = (3, -1, 0.1, 2**40, 0.0, -5.0, 1)


def test_the_function_is_called_with_the_same_arguments():
    seen = []
    kernel = tvm_ffi.convert(lambda *arguments: seen.append(arguments))
    again = launch.launcher_of(kernel, OF, NUMBERS)
    assert record._compiled() is None or not hasattr(again, "__code__"), "by C"
    q, o = torch.randn(8), torch.randn(8)
    assert again(2**45, addresses((q, None)), o)
    kernel(q.data_ptr(), 2**40 + 8, o.data_ptr(), *NUMBERS, 2**45)
    assert seen[0] == seen[1]
    assert [type(x) for x in seen[0]] == [type(x) for x in seen[1]]


def test_a_launch_is_recorded_in_the_order_of_its_description():
    seen = []
    kernel = tvm_ffi.convert(lambda *arguments: seen.append(arguments))
    abi = Abi("toy", addresses_of(q=16, bias=4, o=16), i64("stride"), f32("scale"), i32("T", "is_packed"))
    none = torch.zeros(8)
    operands = {"o": Operand(None, ~0), "q": Operand(None, 0), "bias": Operand(None, 1, absent=none)}
    again = Launch(abi, kernel, operands, {"T": 3, "is_packed": True, "scale": 2, "stride": 2**40}).recorded()
    block = torch.randn(16)
    q, odd, o = block[:8], block[1:9], torch.randn(8)
    assert again(2**45, addresses((q, None)), o)
    assert seen == [(q.data_ptr(), none.data_ptr(), o.data_ptr(), 2**40, 2.0, 3, 1, 2**45)]
    assert not again(2**45, addresses((odd, None)), o), "not aligned as described"
    with pytest.raises(TypeError, match="missing: \\['bias'\\]; unknown: none"):
        Launch(abi, kernel, {"q": Operand(None, 0), "o": Operand(None, ~0)}, {}).recorded()


def test_a_function_that_raises_has_not_launched():
    if record._compiled() is None:
        pytest.skip("native.c cannot be compiled here")

    def fail(*_):
        raise RuntimeError("CUDA error 1")

    q = torch.randn(8)
    again = launch.launcher_of(tvm_ffi.convert(fail), OF, NUMBERS)
    for _ in range(3):
        assert not again(0, addresses((q, None)), q)
    # nothing of that is left for others: neither for a function that works, nor in what another says
    assert tvm_ffi.convert(lambda: 5)() == 5

    def fail_otherwise():
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"):
        tvm_ffi.convert(fail_otherwise)()
    with pytest.raises(RuntimeError, match="CUDA error 1"):  # as the long way meets it
        tvm_ffi.convert(fail)()


def test_any_other_function_is_called_by_python():
    assert launch.frame(print, OF, NUMBERS) is None
