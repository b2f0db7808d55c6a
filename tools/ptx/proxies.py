# SPDX-License-Identifier: Apache-2.0
"""Proxy fences: memory that is accessed by ordinary instructions and by those that work through the async proxy.

A barrier orders two accesses of different proxies only together with a `fence.proxy.async`. From the PTX ISA (9.2):

| rule                                                                                     | section                          |
|------------------------------------------------------------------------------------------|----------------------------------|
| "A proxy fence is required to synchronize memory operations across different proxies"    | Memory Consistency Model,        |
|                                                                                          | Proxies                          |
| such a fence takes effect within a thread and composes with other synchronization; it is | membar, fence                    |
| for the state space that it names, or for all                                            |                                  |
| cp.async.bulk, of bytes and of tensors, uses the async proxy; its completion is followed | Asynchronous copy, Async Proxy   |
| by a fence of its own, so what it wrote needs none                                       |                                  |
| wgmma reads operands in shared memory through the async proxy                            | wgmma, Async Proxy               |
| so do tcgen05.mma and tcgen05.cp                                                         | tcgen05, Shared Memory Accesses  |
| st.async, and cp.async that is not bulk, use the generic proxy                           | st.async; cp.async               |
| a bulk store is complete behind wait_group; with .read only its source has been read     | cp.async.bulk.wait_group         |
| the end of a kernel, and a wait for it, order all proxies                                | Memory synchronization;          |
|                                                                                          | griddepcontrol                   |

So, of shared memory and of what a launch itself has written to global memory:
- A generic write, then an access through the async proxy, be it a read or a write: a fence must lie on a chain of program order,
  barriers and waits that leads from one to the other. Vector clocks find it (`races.py`): beside what a warp knows to have
  happened it keeps what of that lies before a fence, and barriers hand on both.
- A bulk store to global memory, then a read of it: whoever issued it must have waited for its completion.

The ISA says that fences compose, and not how. Where it leaves a choice the stricter one is taken:
- A fence counts for the shared memory of the block that executes it, and for global memory that this block reads. The formal
  model that NVIDIA has published ("Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", ISCA 2022, 5.4) wants it
  in the block of the access that is not generic. So `.shared::cta` and `.shared::cluster` are the same here.
- A fence of some lanes of a warp says nothing of what its other lanes wrote after a barrier or `bar.warp.sync`.
- What other clusters wrote is known behind an `ld.acquire` of anything that the launch has written, and the fence must follow it.

Not reported is a generic read, then a write through the async proxy. By the letter that needs a fence too, but the pipelines of
CUTLASS, where `ldmatrix` reads a stage and an mbarrier hands it back to TMA, have none. Nor is a read through the async proxy,
then a generic write. Fences of the tensormap and the alias proxy raise `Unsupported`. Global memory is looked at in pieces of 16
bytes, the least that bulk copies move; whoever wrote to a piece last counts for all of it.
"""

import numpy as np

from tools.ptx.values import GMEM_BASE, SimulationError

PIECE = 16  # bytes of global memory that are looked at as one
NOBODY = 0  # the number of a cluster that has not written: clusters count from 1
SPACES = ("shared", "global")


def covered_spaces(i):
    """The state spaces that a fence is for; None for a fence that is not of proxies, or of others."""
    kind = i.parts[1:]
    if kind[:1] != ["proxy"]:
        return ()
    return {
        ("async",): SPACES,
        ("async", "global"): ("global",),
        ("async", "shared::cta"): ("shared",),
        ("async", "shared::cluster"): ("shared",),
    }.get(tuple(kind[1:]))


def is_generic(i):
    """Whether an instruction that writes memory does it through the generic proxy."""
    return i.parts[0] != "cp" or i.starts("cp.async.ca", "cp.async.cg")


class GlobalWrites:
    """Who wrote a piece of global memory last, in one launch: the number of the cluster, its warp and that warp's time, the place
    of the instruction."""

    def __init__(self, gmem, is_quiet=False):
        self.is_quiet = is_quiet  # about races
        pieces = gmem.bytes.size // PIECE
        self.cluster, self.warp, self.time, self.place = (np.zeros(pieces, np.int32) for _ in range(4))
        self.clusters = 0  # that have begun
        self.is_pending = np.zeros(pieces, bool)  # written by a bulk store that nobody has waited for
        self.has_stores = False  # of those, any


class Proxies:
    """What of that which a cluster's warps know to have happened lies before a fence, and who wrote what in global memory."""

    def __init__(self, races, program, log):
        self.races, self.log, self.warps = races, log, races.warps
        self.is_generic, self.is_acquire = program.is_generic, program.is_acquire
        n = len(races.clocks)
        # Lanes that have written since the lanes of their warp last met or executed a fence, and the warp's time when they met.
        self.unmet, self.met = np.zeros((n, 32), bool), np.zeros(n, np.int32)
        self.stores, self.groups = [[] for _ in range(n)], [[] for _ in range(n)]  # what a warp's bulk stores write
        log.clusters += 1

    # Fences.

    @staticmethod
    def row(rank, space):
        """Where a clock has what lies before a fence in a block, for its memory."""
        return 1 + 2 * rank + SPACES.index(space)

    def fence(self, v, m, spaces):
        """Lanes of the warps of `v` execute a fence."""
        first, rank = v.start // 32, v.block.rank
        on = np.ones((v.threads // 32, 32), bool) if m is None else m.reshape(-1, 32)
        for warp in np.flatnonzero(on.any(1)):
            own = rank * self.warps + first + int(warp)
            state, is_of_all = self.races.states[own], not (self.unmet[own] & ~on[warp]).any()
            for space in spaces:
                fenced = state[self.row(rank, space)]
                before = fenced[own]
                fenced[:] = state[0]
                fenced[own] = state[0, own] if is_of_all else max(before, self.met[own])
            if is_of_all:
                self.unmet[own] = False
                state[0, own] += 1  # what comes next comes behind the fence

    def meet(self, own):
        """The lanes of a warp have come together: what any of them does next comes after what all of them did."""
        if self.unmet[own].any():
            self.unmet[own], self.met[own] = False, self.races.clocks[own, own]
            self.races.clocks[own, own] += 1

    def meet_warps(self, v, m):
        """Lanes of the warps of `v` are at bar.warp.sync."""
        on = np.ones(v.threads // 32, bool) if m is None else m.reshape(-1, 32).all(1)
        for warp in np.flatnonzero(on):
            self.meet(v.block.rank * self.warps + v.start // 32 + int(warp))

    def write(self, v, m):
        """Lanes of the warps of `v` write through the generic proxy."""
        first = v.block.rank * self.warps + v.start // 32
        unmet = self.unmet[first : first + v.threads // 32]
        if m is None:
            unmet[:] = True
        else:
            unmet |= m.reshape(-1, 32)

    # Shared memory.

    def look(self, place, rank, own, units):
        """Warps access units of the shared memory of a block through the async proxy."""
        races = self.races
        last, at = races.writer[units], races.writer_place[units]
        late = (races.written[units] > races.states[own, self.row(rank, "shared"), last]) & self.is_generic[at]
        if races.is_quiet:  # about those that nothing orders at all
            late &= races.written[units] <= races.clocks[own, last]
        if late.any():
            k = int(late.argmax())
            self.report(place, own[k], races.say(last[k], at[k]), races.where(units[k]))

    def report(self, place, own, other, where):
        raise SimulationError(
            f"a missing proxy fence: {self.races.say(own, place)} is of the async proxy, {other} was of the generic one, and "
            f"no fence.proxy.async is between them; {where}"
        )

    # Global memory.

    def access_global(self, v, m, place, own, start, n, is_write):
        """Threads of some warps access n bytes each through the generic proxy, from an offset in global memory on."""
        log = self.log
        if not is_write and not self.is_acquire[place] and not log.has_stores:
            return
        pieces = pieces_of(start, n)
        own = np.repeat(own, len(pieces) // max(1, len(start)))
        if is_write:
            self.write(v, m)
            log.cluster[pieces], log.warp[pieces], log.place[pieces] = log.clusters, own, place
            log.time[pieces], log.is_pending[pieces] = self.races.clocks[own, own], False
            return
        if self.is_acquire[place]:
            self.races.clocks[own[log.cluster[pieces] != NOBODY], self.races.others] = 1
        self.check_complete(place, own, pieces)

    def copy_from_global(self, i, block, warp, start, n):
        """A warp sets going what reads n bytes from each of some offsets on through the async proxy."""
        log, own = self.log, block.rank * self.warps + warp
        pieces = pieces_of(start, n)
        pieces = pieces[log.cluster[pieces] != NOBODY]
        if pieces.size == 0:
            return
        self.check_complete(i.place, np.full(len(pieces), own), pieces)
        fenced = self.races.states[own, self.row(block.rank, "global")]
        is_ours = log.cluster[pieces] == log.clusters
        late = np.where(is_ours, log.time[pieces] > fenced[log.warp[pieces]], fenced[self.races.others] == 0)
        late &= self.is_generic[log.place[pieces]] | ~is_ours
        if late.any():
            k = int(pieces[late.argmax()])
            self.report(i.place, own, self.say_writer(k), f"global memory at {GMEM_BASE + k * PIECE:#x}")

    def check_complete(self, place, own, pieces):
        """What a bulk store writes is read by nobody before its completion."""
        late = self.log.is_pending[pieces]
        if late.any():
            k = int(late.argmax())
            raise SimulationError(
                f"a bulk store that may not be complete: {self.races.say(own[k], place)} reads what "
                f"{self.say_writer(pieces[k])} writes, and whoever issued that has not waited for it; "
                f"global memory at {GMEM_BASE + int(pieces[k]) * PIECE:#x}"
            )

    def say_writer(self, piece):
        """Who wrote a piece of global memory, in words."""
        log, races = self.log, self.races
        if log.cluster[piece] == log.clusters:
            return races.say(log.warp[piece], log.place[piece])
        return f"another cluster at {races.code[log.place[piece]].text[:90]} (instruction {log.place[piece]})"

    # Bulk stores, in groups: a wait without .read is for the completion of the oldest.

    def copy_to_global(self, i, block, warp, start, n):
        """A warp sets going what writes n bytes from each of some offsets on."""
        log, own, pieces = self.log, block.rank * self.warps + warp, pieces_of(start, n)
        log.cluster[pieces], log.warp[pieces], log.place[pieces] = log.clusters, own, i.place
        log.is_pending[pieces] = log.has_stores = True
        self.stores[own].append(pieces)

    def commit(self, block, warp):
        own = block.rank * self.warps + warp
        self.groups[own].append(self.stores[own])
        self.stores[own] = []

    def complete(self, block, warp, left):
        groups = self.groups[block.rank * self.warps + warp]
        while len(groups) > left:
            for pieces in groups.pop(0):
                self.log.is_pending[pieces] = False


def pieces_of(start, n):
    """The pieces that n bytes from each of some offsets on are in. More than one: the offsets are alike modulo a piece."""
    if n <= PIECE or start.size == 0:
        return start // PIECE
    count = (int(start[0]) % PIECE + n + PIECE - 1) // PIECE
    return (start[:, None] // PIECE + np.arange(count)).ravel()
