# SPDX-License-Identifier: Apache-2.0
"""Run a kernel over a grid, one cluster of blocks after the other, from the first block number to the last."""

import functools
import itertools

import numpy as np

from tools.ptx.block import ORDERS
from tools.ptx.cluster import Cluster
from tools.ptx.program import Program
from tools.ptx.proxies import GlobalWrites
from tools.ptx.values import CLUSTER_BLOCKS, SMEM_BYTES, SimulationError, Unsupported


@functools.lru_cache(maxsize=6)  # of tens of megabytes each; a call of a backend launches a few
def prepared(ptx, kernel, size=None, cluster=(1, 1, 1)):
    """The parsed program and the blocks of a cluster to run it in; translated code stays with them."""
    program = Program(ptx, kernel, size)
    if np.prod(program.block) % 32:
        raise Unsupported("a block size that is not a multiple of 32")
    return program, Cluster(program, cluster)


def run(ptx, kernel, parameters, grid, gmem, smem_bytes, order="late", size=None, cluster=(1, 1, 1), races=False):
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
        cluster: blocks of a cluster along x, y, z.
        races: look for races in shared memory and for missing proxy fences; with "fences" for these alone.
    """
    program, together = prepared(ptx, kernel, size, cluster)
    if len(program.params) != len(parameters):
        raise SimulationError(f"{len(program.params)} kernel parameters expected, {len(parameters)} given")
    if smem_bytes > SMEM_BYTES:
        raise SimulationError(f"{smem_bytes} bytes of shared memory: more than the {SMEM_BYTES} there are")
    if any(n % along for n, along in zip(grid, cluster)) or np.prod(cluster) > CLUSTER_BLOCKS:
        raise SimulationError(f"a grid of {tuple(grid)} blocks in clusters of {tuple(cluster)}")
    space = bytearray(program.param_bytes + 128)
    for (name, (at, size)), raw in zip(program.params.items(), parameters):
        if len(raw) > size:
            raise SimulationError(f"parameter {name[-12:]} has {size} bytes, {len(raw)} given")
        space[at : at + len(raw)] = raw
    log = GlobalWrites(gmem, races == "fences") if races else None
    try:
        with np.errstate(all="ignore"):
            for z, y, x in itertools.product(*(range(0, n, along) for n, along in reversed([*zip(grid, cluster)]))):
                together.start(space, gmem, (x, y, z), grid, smem_bytes, ORDERS[order], log)
                together.run()
    finally:
        together.forget()
