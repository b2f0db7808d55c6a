# SPDX-License-Identifier: Apache-2.0
"""Races in shared memory: two accesses of different warps, one of them a write, that no barrier orders.

They are found by vector clocks, whatever the order in which the simulator ran the accesses. Every warp of a cluster has a time of
its own, which advances with each of its releases (an arrival at a barrier, the issue of a copy), and a clock: for every other
warp, the time up to which all that it did is known to have happened before. A barrier gathers the clocks of the warps that come,
and hands them to those that wait. For each piece of shared memory the last write is kept, and the last read of each warp, with
their times. An access races with an earlier one of another warp if the time of that one is beyond what the accessing warp's
clock says of the other warp.

What counts as an access:
- ld, st, red, ldmatrix and stmatrix, when they run.
- An operand of wgmma: all four warps read it, from issue to wait.
- A copy that is waited for with its group (cp.async, bulk stores): its warp accesses the memory, from issue to wait.
- A copy whose bytes an mbarrier counts (TMA and bulk loads, st.async): an access at its issue. Only that mbarrier says that what
  it writes is there, and it hands on what the issuer knew.

A barrier does not wait for what a warp is still reading: ld and ldmatrix have happened when something uses what they read (see
`flight.py`). Stores of the same block, cp.async too, queue behind such a read. A copy whose bytes an mbarrier counts does not: to
it, a read that is in flight at a release comes after that release, even a read of the warp that issues the copy. Whether the
value that was read matters is not known: what is read for nothing is reported too.

What is not checked: operands of tcgen05 (but see `proxies.py`), what a copy to another block reads after its issue, lanes of a
warp against each other, the barriers themselves, stores from another block against reads in flight. Fences other than those of
proxies are not seen: an arrival counts as a release even if it is relaxed. Of several unordered reductions the last is
remembered; of reads in flight by one instruction likewise, if lanes come to it apart.
"""

import numpy as np

from tools.ptx.proxies import Proxies
from tools.ptx.values import SMEM_BASE, SimulationError, Unsupported

BARRIERS = 64  # mbarriers of a block, at most
UNIT = 2  # bytes that are looked at as one: the smallest that two warps write side by side


class Races:
    """The clocks of a cluster's warps, and for each unit of its shared memory who wrote it last and who read it when."""

    def __init__(self, cluster, program, log):
        self.cluster, self.code, self.is_quiet = cluster, program.code, log.is_quiet
        self.warps = cluster.blocks[0].warps
        n, units = len(cluster.blocks) * self.warps, cluster.smem.size // UNIT
        # For each warp a clock, with its own time in the column of its number. Behind those of warps come one for all other
        # clusters and a slot for the copies that each mbarrier counts. Below its first row are those of `Proxies`.
        self.others, self.slots = n, n + 1
        self.states = np.zeros((n, 1 + 2 * len(cluster.blocks), n + 1 + len(cluster.blocks) * BARRIERS), np.int32)
        self.clocks = self.states[:, 0]
        np.fill_diagonal(self.clocks, 1)
        self.writer, self.written, self.writer_place = (np.zeros(units, np.int32) for _ in range(3))
        self.read, self.reader_place = (np.zeros((units, n), np.int32) for _ in range(2))
        # The same of reads that a release did not wait for, with a time after it: for writers that do not queue behind them.
        self.flying, self.flying_place = (np.zeros((units, n), np.int32) for _ in range(2))
        self.flew = np.zeros(units, bool)  # whether there is any
        self.in_flight = program.in_flight
        self.can_fly = set().union(*self.in_flight.values())
        # For each warp, by the place of such a read: what it touched the last time, in parts.
        self.latest = [{} for _ in range(n)]
        self.proxies = Proxies(self, program, log)

    # Order.

    def new_clock(self):
        """Of a barrier to which nobody has come."""
        return np.zeros(self.states.shape[1:], np.int32)

    def new_slot(self):
        """For another mbarrier: the time of its copies is the phase that counts them."""
        if self.slots == self.clocks.shape[1]:
            raise Unsupported(f"more than {BARRIERS} mbarriers a block, with races looked for")
        self.slots += 1
        return self.slots - 1

    def release(self, block, warp, place, clock):
        """All that a warp has done or knows of comes before what `clock` is handed to; what it does next does not."""
        own = block.rank * self.warps + warp
        np.maximum(clock, self.states[own], out=clock)
        self.fly(own, place)
        self.clocks[own, own] += 1

    def fly(self, own, place):
        """Reads of a warp that are in flight at a release happen, at the latest, after it."""
        in_flight = self.in_flight.get(place, ())
        self.latest[own] = {read: parts for read, parts in self.latest[own].items() if read in in_flight}
        for read, parts in self.latest[own].items():
            for units in parts.values():
                self.flying[units, own] = self.clocks[own, own] + 1
                self.flying_place[units, own], self.flew[units] = read, True

    def issue(self, block, warp, place, barrier=None):
        """The clock of what a warp sets going; with `barrier`, of a copy that it counts."""
        clock = self.new_clock()
        self.release(block, warp, place, clock)
        if barrier is not None:
            clock[0, barrier.slot] = barrier.phases + 1
        return clock

    def acquire(self, block, warp, clock):
        """A warp has waited: what `clock` knows of has happened before what the warp does next."""
        own = block.rank * self.warps + warp
        np.maximum(self.states[own], clock, out=self.states[own])

    def meet(self, block, warp):
        """All lanes of a warp come to a barrier."""
        self.proxies.meet(block.rank * self.warps + warp)

    # Accesses.

    def access(self, v, m, place, words, at, count):
        """Lanes of the warps of `v` access `count` words each; `words` and `at` as `Block.locate` gives them."""
        block, width = v.block, words.itemsize
        lanes, start = np.arange(v.start, v.stop), at.astype(np.int64) * width
        warps, is_write = (lanes if m is None else lanes[m]) // 32, self.code[place].parts[0] != "ld"
        if words is block.gmem.words[width]:
            self.proxies.access_global(v, m, place, block.rank * self.warps + warps, start, width * count, is_write)
            return
        if words is block.smem_words[width]:
            start += block.rank * self.cluster.smem.shape[1]
        self.check(place, block, warps, start, width * count, is_write)
        if is_write:
            self.proxies.write(v, m)

    def access_rows(self, v, m, place, rows, j):
        """Warps of `v` access eight rows of 16 bytes each, whose addresses lanes 8 j to 8 j + 7 hold."""
        lanes = np.arange(v.start, v.stop).reshape(-1, 32)[:, 8 * j : 8 * j + 8]
        on = slice(None) if m is None else m.reshape(-1, 32)[:, 8 * j : 8 * j + 8]
        start = 16 * rows + v.block.rank * self.cluster.smem.shape[1]
        is_write = self.code[place].parts[0] == "stmatrix"
        self.check(place, v.block, lanes[on].ravel() // 32, start[on].ravel(), 16, is_write, part=j)
        if is_write and j == 0:
            self.proxies.write(v, m)

    def copy(self, i, block, warp, owner, address, n, is_write, barrier=None, is_issue=True):
        """A warp of a block sets going, or has waited for, what reads or writes n bytes of a block's shared memory."""
        start = address - SMEM_BASE + owner.rank * self.cluster.smem.shape[1] + np.arange(0, n, min(n, 16))
        if barrier is not None:
            self.fly(block.rank * self.warps + warp, i.place)
        through = owner if is_issue and not self.proxies.is_generic[i.place] else None
        self.check(i.place, block, np.full(len(start), warp), start, min(n, 16), is_write, barrier, through=through)

    def operand(self, place, block, warps, offsets, is_issue):
        """Warps read an operand of a product."""
        start = np.tile(offsets.ravel() + block.rank * self.cluster.smem.shape[1], len(warps))
        self.check(place, block, np.repeat(warps, offsets.size), start, 2, False, through=block if is_issue else None)

    def issued_operand(self, place, block, warp, owner, offsets):
        """A warp issues a product of tcgen05, which reads an operand in the shared memory of a block some time later."""
        units = (offsets.ravel() + owner.rank * self.cluster.smem.shape[1]) // UNIT
        self.proxies.look(place, owner.rank, np.full(units.size, block.rank * self.warps + warp), units)

    def check(self, place, block, warps, start, n, is_write, barrier=None, part=0, through=None):
        """Threads of some warps access n bytes each, from `start` in the cluster's shared memory on; `through` is the block whose
        memory that is if they begin to do so through the async proxy."""
        each = max(1, n // UNIT)
        units = (start[:, None] // UNIT + np.arange(each)).ravel()
        own = np.repeat(block.rank * self.warps + warps, each)
        last = self.writer[units]
        late = (last != own) & (self.written[units] > self.clocks[own, last])
        if self.code[place].parts[0] == "red":  # of which any number may happen at once
            late[late] = [self.code[p].parts[0] != "red" for p in self.writer_place[units[late]]]
        self.report(place, own, units, late, last, self.writer_place[units])
        if through is not None:
            self.proxies.look(place, through.rank, own, units)
        if not is_write:
            self.read[units, own] = self.clocks[own, own]
            self.reader_place[units, own] = place
            for warp in np.unique(own) if place in self.can_fly else ():
                self.latest[warp].setdefault(place, {})[part] = units[own == warp]
            return
        unknown = self.read[units] > self.clocks[own, : self.read.shape[1]]
        unknown[np.arange(len(own)), own] = False
        other = unknown.argmax(1)
        self.report(place, own, units, unknown.any(1), other, self.reader_place[units, other])
        if barrier is not None and self.flew[units].any():
            unknown = self.flying[units] > self.clocks[own, : self.flying.shape[1]]
            other = unknown.argmax(1)
            note = ", which may still be reading"
            self.report(place, own, units, unknown.any(1), other, self.flying_place[units, other], note)
        self.writer_place[units] = place
        if barrier is not None:
            self.writer[units], self.written[units] = barrier.slot, barrier.phases + 1
            return
        self.writer[units], self.written[units] = own, self.clocks[own, own]
        if self.code[place].parts[0] != "red":
            last = self.writer[units]
            self.report(place, own, units, last != own, last, self.writer_place[units])  # at once, by one instruction

    def report(self, place, own, units, is_race, others, other_places, note=""):
        """Raise if any access is in a race, with both instructions and the place in memory."""
        if self.is_quiet or not is_race.any():
            return
        k = int(is_race.argmax())
        raise SimulationError(
            f"a race: {self.say(own[k], place)} and, not ordered before it, {self.say(others[k], other_places[k])}{note}; "
            f"{self.where(units[k])}"
        )

    def where(self, unit):
        """A place in shared memory, in words."""
        rank, at = divmod(int(unit) * UNIT, self.cluster.smem.shape[1])
        return f"{at} bytes into the shared memory of block {self.cluster.blocks[rank].index}"

    def say(self, warp, place):
        """Who did what, in words."""
        rank, own = divmod(int(warp), self.warps)
        who = f"warp {own} of block {self.cluster.blocks[rank].index}" if warp < len(self.clocks) else "a copy"
        return f"{who} at {self.code[place].text[:90]} (instruction {place})"
