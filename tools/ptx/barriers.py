# SPDX-License-Identifier: Apache-2.0
"""Barriers of a block: named ones and mbarriers."""

from typing import NamedTuple

import numpy as np

from tools.ptx.instruction import Address
from tools.ptx.values import U32, SimulationError, Unsupported


class Wait(NamedTuple):
    """Why a warp cannot go on: until `is_over()`; `finish`, if it has one, is then told True, or False if it gave up.
    `clock()` is what the warp then knows to have happened, if races are looked for."""

    is_over: object
    finish: object = None
    clock: object = None


class Mbarrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes have come."""

    def __init__(self, count, races=None):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        if races is not None:
            self.slot, self.phases = races.new_slot(), 0
            # What those that come to this phase know, and those of phases that are over.
            self.coming, self.known = races.new_clock(), races.new_clock()
        self.races = races

    def arrive(self, n=1):
        self.pending -= n
        if self.pending < 0:
            raise SimulationError("too many arrivals on an mbarrier")
        self.settle()

    def expect(self, n):
        """Announce n bytes, or with a negative n take note that they have come."""
        self.bytes += n

    def know(self, clock):
        """What comes to this phase by itself comes after what its issuer knew."""
        if clock is not None:
            np.maximum(self.coming, clock, out=self.coming)

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            if self.races is not None:
                self.known, self.phases = self.coming.copy(), self.phases + 1
            self.pending = self.count


class Barriers:
    """What `bar` and `mbarrier` instructions do."""

    def __init__(self, block):
        self.block = block

    def start(self):
        self.named, self.at = {}, {}

    def barrier(self, i, warp, lanes):
        if i.parts[1] == "cluster":
            return self.block.cluster.barrier.execute(self.block, i, warp, lanes)
        return self.named_barrier(i, warp, lanes)

    def named_barrier(self, i, warp, lanes):
        if not lanes.all():
            raise SimulationError(f"{i.text} in divergent code")
        block = self.block
        number = int(block.value(i.args[0], "U", warp)[0])
        count = int(block.value(i.args[1], "U", warp)[0]) if len(i.args) > 1 else 32 * block.warps
        # threads that have come, rounds that are over, the instruction that threads of this round wait at, what those know
        barrier = self.named.setdefault(number, [0, 0, None, None])
        barrier[0] += 32
        rounds, waits = barrier[1], "arrive" not in i.parts
        if block.races is not None:
            barrier[3] = block.races.new_clock() if barrier[3] is None else barrier[3]
            block.races.release(block, warp, i.place, barrier[3])
        clock = barrier[3]
        if waits and i.parts[0] == "bar":  # which is short for barrier.aligned
            if barrier[2] not in (None, id(i)):
                raise SimulationError(f"{i.text}: other threads wait at another instruction, which `bar` promises they do not")
            barrier[2] = id(i)
        if barrier[0] == count:
            barrier[:] = 0, rounds + 1, None, None
            block.cluster.progress += 1
        elif barrier[0] > count:
            raise SimulationError(f"{i.text}: more threads than the barrier's count")
        return Wait(lambda: barrier[1] > rounds, clock=lambda: clock) if waits else None

    def mbarrier(self, i, warp, lanes):
        kind, block, A = i.parts[1], self.block, i.args
        if kind == "init":
            addresses, counts = block.address(A[0], warp), block.value(A[1], "U", warp)
            for lane in np.flatnonzero(lanes):
                block.check_shared(int(addresses[lane]), 8, 8, i.text)
                self.at[int(addresses[lane])] = Mbarrier(int(counts[lane]), block.races)
        elif kind in ("arrive", "expect_tx"):
            self.arrive(i, warp, lanes)
        elif kind in ("try_wait", "test_wait"):
            return self.wait(i, warp, lanes)
        elif kind != "inval":
            raise Unsupported(i.text)
        return None

    def arrive(self, i, warp, lanes):
        block, expects, arrives = self.block, "expect_tx" in i.parts, i.parts[1] == "arrive"
        where = next(n for n, a in enumerate(i.args) if isinstance(a, Address))
        addresses, rest = block.address(i.args[where], warp), i.args[where + 1 :]
        numbers = block.value(rest[0], "U", warp) if rest else np.ones(32, U32)
        find = self.find_in_cluster if "shared::cluster" in i.parts else self.find
        for lane in np.flatnonzero(lanes):
            barrier, n = find(addresses[lane]), int(numbers[lane])
            if block.races is not None:
                block.races.release(block, warp, i.place, barrier.coming)
            if expects:
                barrier.expect(n)
            if arrives:
                barrier.arrive(1 if expects else n)
            else:
                barrier.settle()
        block.cluster.progress += 1

    def wait(self, i, warp, lanes):
        if "parity" not in i.parts:
            raise Unsupported(i.text)
        block, to = self.block, i.args[0]
        barrier = self.find(block.uniform(block.address(i.args[1], warp), lanes, "an mbarrier's address"))
        parity = block.uniform(block.value(i.args[2], "U", warp), lanes, "the parity")
        block.write(to, warp, True, lanes)
        if barrier.phase != parity:
            if block.races is not None:
                block.races.acquire(block, warp, barrier.known)
            return None
        return Wait(lambda: barrier.phase != parity, lambda done: block.write(to, warp, done, lanes), lambda: barrier.known)

    def find(self, address):
        barrier = self.at.get(int(address))
        if barrier is None:
            raise SimulationError(f"no mbarrier at {int(address):#x} in block {self.block.index}")
        return barrier

    def find_in_cluster(self, address):
        """An mbarrier that another block of the cluster may own."""
        owner, there = self.block.cluster.owner(self.block, address)
        return owner.barriers.find(there)
