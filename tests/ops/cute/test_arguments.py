# SPDX-License-Identifier: Apache-2.0
"""Functions that are compiled, made from the description of their arguments."""

import pytest
import torch

from cula.ops.cute.toolchain import build
from tests.support.abi import ORDERS
from tests.support.cute import needs_dsl
from tools.ptx import Pointer, simulate

MODULES = ("tests.support.kernels.described",)


@needs_dsl
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_arguments_is_that_of_the_description(order):
    """A call is packed by names and a host function reads names: two that change places do so for both."""
    x, y, o = torch.randn(20), torch.randn(20), torch.full((20,), torch.nan)
    abi = ORDERS[order]
    addresses = abi.pack_addresses({"x": Pointer(x), "y": Pointer(y), "o": Pointer(o)})
    simulate(f"sum_{order}", *addresses, *abi.pack_numbers({"n": 20, "scale": 2.0, "shift": -3.0}), modules=MODULES)
    torch.testing.assert_close(o, 2 * x - 3 * y)


@needs_dsl
def test_what_is_not_described_cannot_be_read(tmp_path):
    with pytest.raises(build.CompileError, match="'Arguments' object has no attribute 'not_described'"):
        build.build("sm_90a", MODULES, tmp_path, ["sum_of_more"])
