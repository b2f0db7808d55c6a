# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the same arguments in two orders, for `kernels/described.py`."""

from cula.ops.cute.abi import Abi, addresses, f32, i32

ORDERS = {
    "as_read": Abi("sum", addresses(x=4, y=4, o=4), i32("n"), f32("scale", "shift")),
    "swapped": Abi("sum", addresses(y=4, o=4, x=4), f32("shift", "scale"), i32("n")),
}
