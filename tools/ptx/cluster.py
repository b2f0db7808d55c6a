# SPDX-License-Identifier: Apache-2.0
"""The blocks of one cluster, which run together; a launch without clusters has clusters of one block.

Each block in turn goes as far as it gets. Only when none can go on does an asynchronous thing happen, or a try_wait give up.
"""

import math

import numpy as np

from tools.ptx.barriers import Wait
from tools.ptx.block import DONE, Block
from tools.ptx.races import Races
from tools.ptx.values import S64, SMEM_BASE, SMEM_WINDOW, SimulationError

NAN_BYTE = 0xFF  # of memory that was not written: NaN in every format of floats


class Cluster:
    """Blocks that run together, and what they have in common: asynchronous work, the barrier of the cluster, races."""

    def __init__(self, program, shape):
        self.program, self.shape = program, shape
        self.blocks = [Block(program, self, rank) for rank in range(math.prod(shape))]
        self.barrier = ClusterBarrier(self.blocks)

    def start(self, parameters, gmem, index, grid, smem_bytes, order, log=None):
        """Begin the cluster whose first block is `index` of a grid; with what the launch has written so far, look for races."""
        self.order = order
        self.events = []  # asynchronous work not done yet, the oldest first
        self.progress = 0  # how much has happened that a wait may be for
        self.smem = np.full((len(self.blocks), -(-smem_bytes // 1024) * 1024), NAN_BYTE, np.uint8)
        self.smem_words = {width: self.smem.reshape(-1).view(f"u{width}") for width in (1, 2, 4, 8)}
        self.races = None if log is None else Races(self, self.program, log)
        self.barrier.start()
        nx, ny, _ = self.shape
        for block in self.blocks:
            inside = (block.rank % nx, block.rank // nx % ny, block.rank // (nx * ny))
            own = tuple(first + at for first, at in zip(index, inside))
            block.start(parameters, gmem, own, grid, smem_bytes, order)

    def forget(self):
        """Let go of the memories of the blocks that have run, and of what was known of accesses to them: a hundred megabytes."""
        self.events, self.smem, self.smem_words, self.races = [], None, None, None
        for block in self.blocks:
            block.forget()

    # The scheduler.

    def run(self):
        """Run all blocks to their end."""
        # A block that always goes first would hide what its partner does too early.
        blocks = self.blocks[::-1] if self.order.warps == "last" else self.blocks
        while True:
            while any([block.run() for block in blocks]) and len(blocks) > 1:
                pass
            if not self.unblock():
                break
        for block in blocks:
            block.finish()

    def unblock(self):
        """No warp can move: let one asynchronous thing happen, else let a try_wait give up; False when all is done."""
        if self.events:
            self.events.pop(0)()
            self.progress += 1
            return True
        stuck = [block for block in self.blocks if not block.has_ended()]
        if not stuck:
            return False
        if any(block.give_up() for block in stuck):
            return True
        where = "; in ".join(f"block {block.index}: {block.what_waits()}" for block in stuck)
        raise SimulationError(f"deadlock in {where}")

    # Shared memory of the blocks. A mapped address is an ordinary one, a window further for each rank: block 0 has the first.

    def owner(self, block, address):
        """The block whose shared memory an address of shared::cluster is in, which must not have ended, and the address there."""
        window, there = divmod(int(address), SMEM_WINDOW)
        return (block if window < 1 else self.running(window - 1, address)), there

    def running(self, rank, address):
        """The block of a rank, which must not have ended."""
        if rank >= len(self.blocks):
            raise SimulationError(f"no block of rank {rank} in a cluster of {len(self.blocks)}: shared address {int(address):#x}")
        other = self.blocks[rank]
        if other.has_ended():
            raise SimulationError(f"block {other.index} has ended: its shared memory cannot be reached at {int(address):#x}")
        return other

    def named(self, mask, address):
        """The blocks that a mask of a multicast names, bit by bit their ranks; none of them may have ended."""
        if mask == 0:
            raise SimulationError(f"a multicast to no block: shared address {int(address):#x}")
        return [self.running(rank, address) for rank in range(16) if mask >> rank & 1]

    def locate(self, block, addresses, width, n):
        """The words of all shared memories and the index in them of each access of n bytes; None where there is none."""
        rank, offset = np.divmod(addresses.astype(S64), SMEM_WINDOW)
        rank, offset = np.where(rank == 0, block.rank, rank - 1), offset - SMEM_BASE
        if offset.min() < 0 or offset.max() + n > block.smem_bytes:
            return None
        for r in np.unique(rank):
            self.running(int(r), addresses[rank == r][0])
        return self.smem_words[width], (rank * self.smem.shape[1] + offset) // width


class ClusterBarrier:
    """barrier.cluster: a warp's wait is over when all others have arrived as often as it has, or ended."""

    def __init__(self, blocks):
        self.blocks = blocks

    def start(self):
        self.arrivals = [[0] * block.warps for block in self.blocks]
        self.waits = [[0] * block.warps for block in self.blocks]
        self.clocks = {}  # what those that come to a round know, by its number

    def execute(self, block, i, warp, lanes):
        """A warp arrives, or waits."""
        if not lanes.all():
            raise SimulationError(f"{i.text} in divergent code")
        arrivals, waits = self.arrivals[block.rank], self.waits[block.rank]
        arrives = i.parts[2] == "arrive"
        if arrivals[warp] - waits[warp] != (0 if arrives else 1):
            raise SimulationError(f"{i.text}: arrive and wait must take turns")
        if arrives:
            arrivals[warp] += 1
            if block.races is not None:
                clock = self.clocks.setdefault(arrivals[warp], block.races.new_clock())
                block.races.meet(block, warp)
                block.races.release(block, warp, i.place, clock)
            block.cluster.progress += 1
            return None
        waits[warp] += 1
        count = waits[warp]
        return Wait(lambda: self.is_complete(count), clock=lambda: self.clocks[count])

    def is_complete(self, count):
        """Whether every warp has arrived so often, or has ended."""
        for block, arrivals in zip(self.blocks, self.arrivals):
            for arrived, place in zip(arrivals, block.place):
                if arrived < count and place != DONE:
                    return False
        return True
