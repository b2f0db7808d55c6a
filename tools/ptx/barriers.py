# SPDX-License-Identifier: Apache-2.0
"""Barriers of a block: named barriers (`bar`, `barrier`) and mbarriers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tools.ptx.instruction import Address
from tools.ptx.values import U32, SimulationError, Unsupported

MBARRIER_BYTES = 8


class Wait(NamedTuple):
    """Why a warp cannot go on. It can as soon as `is_over()`."""

    is_over: Callable[[], bool]
    finish: Callable[[bool], None] | None = None  # is then told True, or False if the wait gave up
    clock: Callable[[], np.ndarray] | None = None  # what the warp then knows to have happened, if races are looked for


class NamedBarrier:
    """One of a block's numbered barriers. A round of it ends when as many threads have come as its instructions say."""

    def __init__(self):
        self.rounds = 0  # that are over
        self.begin_round()

    def begin_round(self):
        self.threads = 0  # that have come
        self.place = None  # of the instruction that they wait at
        self.clock = None  # what they know to have happened, if races are looked for

    def end_round(self):
        self.rounds += 1
        self.begin_round()


class Mbarrier:
    """A barrier in shared memory. A phase of it ends when all arrivals and all announced bytes have come."""

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
        """End the phase if nothing is missing."""
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
        self.named, self.at = {}, {}  # by number; mbarriers by address

    def barrier(self, i, warp, lanes):
        """`barrier`: one of the cluster, or a named one."""
        if i.parts[1] == "cluster":
            return self.block.cluster.barrier.execute(self.block, i, warp, lanes)
        return self.named_barrier(i, warp, lanes)

    def named_barrier(self, i, warp, lanes):
        """A warp comes to a named barrier; a Wait if it does more than arrive."""
        if not lanes.all():
            raise SimulationError(f"{i.text} in divergent code")
        block = self.block
        number = int(block.value(i.args[0], "U", warp)[0])
        count = int(block.value(i.args[1], "U", warp)[0]) if len(i.args) > 1 else 32 * block.warps
        barrier = self.named.get(number)
        if barrier is None:
            barrier = self.named[number] = NamedBarrier()
        barrier.threads += 32
        rounds, waits = barrier.rounds, "arrive" not in i.parts
        if block.races is not None:
            barrier.clock = block.races.new_clock() if barrier.clock is None else barrier.clock
            block.races.meet(block, warp)
            block.races.release(block, warp, i.place, barrier.clock)
        clock = barrier.clock
        if waits and i.parts[0] == "bar":  # which is short for barrier.aligned
            if barrier.place not in (None, i.place):
                raise SimulationError(f"{i.text}: other threads wait at another instruction, which `bar` promises they do not")
            barrier.place = i.place
        if barrier.threads == count:
            barrier.end_round()
            block.cluster.progress += 1
        elif barrier.threads > count:
            raise SimulationError(f"{i.text}: more threads than the barrier's count")
        return Wait(lambda: barrier.rounds > rounds, clock=lambda: clock) if waits else None

    def mbarrier(self, i, warp, lanes):
        """An instruction of an mbarrier; a Wait if the warp must wait."""
        kind, block, A = i.parts[1], self.block, i.args
        if kind == "init":
            addresses, counts = block.address(A[0], warp), block.value(A[1], "U", warp)
            for lane in np.flatnonzero(lanes):
                block.check_shared(int(addresses[lane]), MBARRIER_BYTES, MBARRIER_BYTES, i.text)
                self.at[int(addresses[lane])] = Mbarrier(int(counts[lane]), block.races)
        elif kind in ("arrive", "expect_tx"):
            self.arrive(i, warp, lanes)
        elif kind in ("try_wait", "test_wait"):
            return self.wait(i, warp, lanes)
        elif kind != "inval":
            raise Unsupported(i.text)
        return None

    def arrive(self, i, warp, lanes):
        """Arrivals, announced bytes or both, one of each active lane."""
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
        """Until the phase of a parity is over. A try_wait that nothing ends gives up, and the kernel's loop tries again."""
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
