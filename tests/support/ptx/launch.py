# SPDX-License-Identifier: Apache-2.0
"""Run a kernel over a grid, one block after the other."""

import functools
import itertools

import numpy as np

from tests.support.ptx.block import ORDERS, Block
from tests.support.ptx.program import Program
from tests.support.ptx.values import SMEM_BYTES, SimulationError, Unsupported


@functools.lru_cache(maxsize=64)
def prepared(ptx, kernel, size=None):
    """The parsed program and a block to run it in; translated code stays with them."""
    program = Program(ptx, kernel, size)
    if np.prod(program.block) % 32:
        raise Unsupported("a block size that is not a multiple of 32")
    return program, Block(program)


def run(ptx, kernel, parameters, grid, gmem, smem_bytes, order="late", size=None):
    """Run a kernel.

    Args:
        ptx: the text of the module.
        kernel: its name in there, or None for the first.
        parameters: bytes, one entry a parameter.
        grid: blocks along x, y, z.
        gmem: the GlobalMemory that parameters point into.
        smem_bytes: dynamic shared memory of the launch.
        order: a name of ORDERS.
        size: threads of a block along x, y, z; None for a kernel that says it itself.
    """
    program, block = prepared(ptx, kernel, size)
    if len(program.params) != len(parameters):
        raise SimulationError(f"{len(program.params)} kernel parameters expected, {len(parameters)} given")
    if smem_bytes > SMEM_BYTES:
        raise SimulationError(f"{smem_bytes} bytes of shared memory: more than the {SMEM_BYTES} there are")
    space = bytearray(program.param_bytes + 128)
    for (name, (at, size)), raw in zip(program.params.items(), parameters):
        if len(raw) > size:
            raise SimulationError(f"parameter {name[-12:]} has {size} bytes, {len(raw)} given")
        space[at : at + len(raw)] = raw
    with np.errstate(all="ignore"):
        for z, y, x in itertools.product(*(range(n) for n in reversed(grid))):
            block.start(space, gmem, (x, y, z), grid, smem_bytes, ORDERS[order])
            block.run()
