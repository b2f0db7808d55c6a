# SPDX-License-Identifier: Apache-2.0
"""Descriptions of arguments that are wrong on purpose."""

from cula.ops.cute.abi import Abi


def swapped(abi, one, other):
    """The same description with two arguments exchanged."""
    names = [a.name for a in abi.args]
    args, i, j = list(abi.args), names.index(one), names.index(other)
    args[i], args[j] = args[j], args[i]
    return Abi(abi.name, tuple(args))
