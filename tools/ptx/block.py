# SPDX-License-Identifier: Apache-2.0
"""One block of threads: its registers and memory, and the scheduler that takes its warps through a program.

Of the warps that can go on, those that stand at the smallest place go together, so structured code reconverges, lanes and
warps alike, and one numpy call serves them all. Asynchronous work is done at one of the two ends of what a program allows.
"""

from typing import NamedTuple

import numpy as np

from tools.ptx.barriers import Barriers
from tools.ptx.copies import Copies
from tools.ptx.instruction import BRANCHES, SPECIAL_REGISTERS
from tools.ptx.operations import behind
from tools.ptx.registers import Views
from tools.ptx.tcgen05 import TensorMemory
from tools.ptx.values import F32, GMEM_BASE, S32, S64, SMEM_BASE, U16, U32, U64, SimulationError, Unsupported
from tools.ptx.wgmma import Wgmma

ALL = np.ones(32, bool)
DONE = -1  # where a thread that has ended stands

# What carries out an instruction that waits, arrives or moves data by itself: a part of a block and its method, by the opcode.
UNITS = {
    "bar": ("barriers", "named_barrier"),
    "barrier": ("barriers", "barrier"),
    "mbarrier": ("barriers", "mbarrier"),
    "cp": ("copies", "execute"),
    "st": ("copies", "store_async"),
    "tcgen05": ("tmem", "execute"),
}


class Order(NamedTuple):
    """One of the ways in which a machine may run a program; a correct one gives the same result in all."""

    late_loads: bool  # bulk loads happen when no warp can go on without them; else at issue
    late_products: bool  # tcgen05 products and commits likewise, and tcgen05.st at its wait
    warps: str = "together"  # or one at a time as far as it gets: "first" (the last, then upwards) or "last" (downwards)


ORDERS = {
    "late": Order(late_loads=True, late_products=True),  # a missing wait of a reader shows
    "early": Order(late_loads=False, late_products=False),  # a buffer handed back, or a sum overwritten, too early shows
    "first": Order(late_loads=False, late_products=False, warps="first"),  # a missing barrier between warps shows
    "last": Order(late_loads=False, late_products=False, warps="last"),
    "products": Order(late_loads=True, late_products=False),  # a product that does not wait for its loads shows
    "loads": Order(late_loads=False, late_products=True),
}


class Block:
    """A block that runs again and again: `start` makes it another block of a grid."""

    def __init__(self, program, cluster, rank):
        self.program, self.cluster, self.rank = program, cluster, rank
        self.threads = int(np.prod(program.block))
        self.warps = self.threads // 32
        dtypes = {"U": U32, "D": U64, "H": U16, "P": bool}
        self.registers = {file: np.empty((program.count[file], self.threads), dtype) for file, dtype in dtypes.items()}
        self.barriers, self.copies, self.wgmma, self.tmem = Barriers(self), Copies(self), Wgmma(self), TensorMemory(self)
        self.views = {}

    def start(self, parameters, gmem, index, grid, smem_bytes, order):
        """Begin block `index` of a grid, with nothing left of the one before: registers and shared memory are NaN."""
        for file, rows in self.registers.items():
            rows.fill(False if file == "P" else np.iinfo(rows.dtype).max)
        self.parameters, self.gmem, self.index, self.grid, self.order = parameters, gmem, index, grid, order
        self.smem_bytes, self.races = smem_bytes, self.cluster.races
        self.smem = self.cluster.smem[self.rank]
        self.smem_rows = self.smem.view(U16).reshape(-1, 8)  # of 16 bytes
        self.smem_words = {width: self.smem.view(f"u{width}") for width in (1, 2, 4, 8)}
        # A warp stands at one place, or (place None) its lanes each at their own.
        self.place, self.lane_places = [0] * self.warps, [None] * self.warps
        self.waits = [None] * self.warps  # (Wait, text of the instruction)
        self.given_up = [-1] * self.warps
        for part in (self.barriers, self.copies, self.wgmma, self.tmem):
            part.start()
        for views in self.views.values():
            views.enter(index, grid)

    def forget(self):
        """Let go of memory, and of what waits for it to change."""
        self.gmem = self.races = self.smem = self.smem_rows = self.smem_words = None
        self.waits = [None] * self.warps
        for part in (self.barriers, self.copies, self.wgmma, self.tmem):
            part.start()

    # The scheduler.

    def run(self):
        """Go on until no warp can; whether any could."""
        has_moved = False
        while ready := self.without_partial_warpgroups(self.ready()):
            self.advance_some(ready)
            has_moved = True
        return has_moved

    def finish(self):
        """What was never waited for happens now, or is an error."""
        for part in (self.wgmma, self.copies, self.tmem):
            part.finish()

    def ready(self):
        """(place, warp) of the warps that can go on."""
        found = []
        for warp in range(self.warps):
            blocked = self.waits[warp]
            if blocked is not None:
                wait = blocked[0]
                if not wait.is_over():
                    continue
                self.waits[warp] = None
                self.cluster.progress += 1
                if wait.finish:
                    wait.finish(True)
                if self.races is not None and wait.clock:
                    self.races.acquire(self, warp, wait.clock())
            place = self.place[warp]
            if place is None:
                lanes = self.lane_places[warp]
                place = int(lanes[lanes >= 0].min())
            if place >= 0:
                found.append((place, warp))
        return found

    def without_partial_warpgroups(self, ready):
        """A wgmma starts when the four warps of a warpgroup have all come to it."""
        places = self.program.wgmma_places
        if not places or not any([place in places for place, _ in ready]):
            return ready
        at = {warp: place for place, warp in ready}
        whole = lambda place, warp: all(at.get(w) == place for w in warpgroup(warp))
        return [(place, warp) for place, warp in ready if place not in places or whole(place, warp)]

    def advance_some(self, ready):
        """Take the warps that the order prefers one step further."""
        if self.order.warps == "together":
            place = min(ready)[0]
            chosen = [warp for p, warp in ready if p == place]
        else:
            # "first": the last warp, often the one that loads, gets ahead; then 0, 1, 2, ...
            from_end = self.order.warps == "last" or ready[-1][1] == self.warps - 1
            place, warp = ready[-1] if from_end else ready[0]
            chosen = list(warpgroup(warp)) if place in self.program.wgmma_places else [warp]
        i = 0
        while i < len(chosen):  # runs of neighbours
            j = i
            while j + 1 < len(chosen) and chosen[j + 1] == chosen[j] + 1:
                j += 1
            self.step(place, chosen[i], chosen[j] + 1)
            i = j + 1

    def give_up(self):
        """Let a try_wait give up, once for all that has happened since; whether there was one."""
        progress = self.cluster.progress
        for warp, blocked in enumerate(self.waits):
            if blocked and blocked[0].finish and self.given_up[warp] != progress:
                self.given_up[warp], self.waits[warp] = progress, None
                blocked[0].finish(False)
                return True
        return False

    def what_waits(self):
        """The warps that wait, and where, for the message of a deadlock."""
        waiting = [f"warp {warp} at {blocked[1][:90]}" for warp, blocked in enumerate(self.waits) if blocked]
        return ", ".join(waiting) or "part of a warpgroup never comes to its wgmma"

    def has_ended(self):
        return all(place == DONE for place in self.place)

    def step(self, place, first, end):
        """Take warps `first` to `end`, which all have lanes at `place`, through the segment or instruction there."""
        mask = None
        if any(self.place[warp] is None for warp in range(first, end)):
            parts = [ALL if self.place[w] is not None else self.lane_places[w] == place for w in range(first, end)]
            mask = np.concatenate(parts)
        views = self.view(first, end)
        segment = self.program.segment(place)
        if segment.function is not None:
            for warp in range(first, end):
                if self.tmem.pending[warp]:
                    self.tmem.follow(warp, segment.instructions)
            if mask is not None and segment.is_collective:
                raise SimulationError(f"a warp's collective in divergent code: {segment.instructions[0].text[:80]} ...")
            self.call(segment, views, mask)
            self.move(first, end, mask, segment.end)
            return
        i = self.program.code[place]
        for warp in range(first, end):
            if self.tmem.pending[warp] & i.reads:
                raise SimulationError(f"a register of a tcgen05.ld is used before tcgen05.wait::ld: {i.text[:80]}")
        active = mask
        if i.predicate is not None:
            guard = views.P[self.program.registers[i.predicate][1]]
            guard = ~guard if i.negated else guard.copy()
            active = guard if mask is None else mask & guard
            if active.all():
                active = None
        if i.parts[0] in BRANCHES:
            to = self.program.labels[i.args[0]] if i.parts[0] == "bra" else DONE
            self.branch(first, end, mask, active, to, segment.end)
            return
        self.move(first, end, mask, segment.end)  # first, so that a warp that waits stands behind the instruction
        if active is None or active.any():
            self.execute(i, place, views, first, end, active)

    def call(self, segment, views, mask):
        """Run a segment's function; lanes that are not in the mask keep their registers."""
        if mask is None:
            segment.function(views, None)
            return
        before = [(row, row.copy()) for row in (views.row(*register) for register in segment.writes)]
        segment.function(views, mask)
        for row, old in before:
            np.copyto(row, old, where=~mask)

    def execute(self, i, place, views, first, end, active):
        """Carry out one instruction for the active lanes of warps `first` to `end`."""
        if i.predicate is not None:
            simple = self.program.guarded(place)
            if simple is not None:
                self.call(simple, views, np.ones(views.threads, bool) if active is None else active)
                return
        if i.parts[0] == "wgmma":
            if active is not None:
                raise SimulationError("wgmma in divergent code")
            self.wgmma.execute(i, first, end)
            return
        if i.parts[0] not in UNITS:
            raise Unsupported(i.text[:120])
        part, method = UNITS[i.parts[0]]
        unit = getattr(getattr(self, part), method)
        for warp in range(first, end):
            lanes = ALL if active is None else active[32 * (warp - first) : 32 * (warp - first + 1)]
            if active is None or lanes.any():
                wait = unit(i, warp, lanes)
                if wait is not None:
                    self.waits[warp] = (wait, i.text)

    def branch(self, first, end, mask, taken, to, otherwise):
        """Move the lanes of `taken` (None: all) to one place and the others to another."""
        if taken is None:
            self.move(first, end, mask, to)
            return
        for warp in range(first, end):
            part = slice(32 * (warp - first), 32 * (warp - first + 1))
            t, on = taken[part], ALL if mask is None else mask[part]
            lanes = None if mask is None else on
            if not t.any():
                self.move(warp, warp + 1, lanes, otherwise)
            elif (t == on).all():
                self.move(warp, warp + 1, lanes, to)
            else:
                places = np.full(32, self.place[warp]) if self.lane_places[warp] is None else self.lane_places[warp]
                places[on & ~t] = otherwise
                places[t] = to
                self.lane_places[warp], self.place[warp] = places, None
                self.reconverge(warp)

    def move(self, first, end, mask, to):
        """Have warps, or the lanes of a mask, stand at another place."""
        for warp in range(first, end):
            if mask is None or self.place[warp] is not None:
                self.place[warp] = to
            else:
                self.lane_places[warp][mask[32 * (warp - first) : 32 * (warp - first + 1)]] = to
                self.reconverge(warp)

    def reconverge(self, warp):
        """A warp whose lanes all stand at one place goes on as one."""
        places = self.lane_places[warp]
        if (places == places[0]).all():
            self.place[warp], self.lane_places[warp] = int(places[0]), None

    def view(self, first, end):
        """The registers of warps `first` to `end`, as generated code sees them; made once."""
        views = self.views.get((first, end))
        if views is None:
            views = self.views[(first, end)] = Views(self, first, end)
            views.enter(self.index, self.grid)
        return views

    # Operands of one warp, for the units.

    def value(self, operand, view, warp):
        """The 32 values of an operand."""
        if operand in SPECIAL_REGISTERS:
            return np.broadcast_to(self.view(warp, warp + 1).special[operand], 32)
        if not operand.startswith("%"):
            return np.full(32, self.program.environment[self.program.constant(view, self.program.literal(operand))])
        file, n = self.program.registers[operand]
        row = self.registers[file][n, 32 * warp : 32 * warp + 32]
        return row.view({"S": S32, "F": F32}[view]) if view in "SF" and file == "U" else row

    def address(self, operand, warp):
        """The 32 addresses of a memory operand."""
        if not operand.base.startswith("%"):
            return np.full(32, self.program.literal(operand.base) + operand.offset, S64)
        file, n = self.program.registers[operand.base]
        return behind(self.registers[file][n, 32 * warp : 32 * warp + 32], operand.offset)

    def uniform(self, values, lanes, what):
        """The one value that all active lanes hold."""
        values = values[lanes]
        if (values != values[0]).any():
            raise SimulationError(f"{what} differs between the lanes of a warp")
        return int(values[0])

    def write(self, name, warp, value, lanes):
        """Write a register of one warp's active lanes."""
        if name != "_":
            file, n = self.program.registers[name]
            self.registers[file][n, 32 * warp : 32 * warp + 32][lanes] = value

    # Memory.

    def locate(self, space, addresses, width, count):
        """The words of a memory and the index in them of each access of `count` words; checks range and alignment."""
        n = width * count
        if addresses.size == 0:
            return self.smem_words[width], addresses
        low, high = int(addresses.min()), int(addresses.max()) + n
        if (addresses & (n - 1)).any():
            bad = addresses[(addresses & (n - 1)) != 0][0]
            raise SimulationError(f"a misaligned access of {n} bytes at {int(bad):#x}")
        if space != "global" and low >= SMEM_BASE and high <= SMEM_BASE + self.smem_bytes:
            return self.smem_words[width], (addresses - SMEM_BASE) // width
        if space == "shared::cluster" and low >= SMEM_BASE:
            found = self.cluster.locate(self, addresses, width, n)
            if found is not None:
                return found
        if space in ("global", "generic") and low >= GMEM_BASE:
            offsets = addresses - GMEM_BASE
            self.gmem.check(offsets, n, "an access")
            return self.gmem.words[width], offsets // width
        raise SimulationError(f"no {space} memory at {low:#x}..{high:#x}")

    def check_shared(self, address, n, alignment, what):
        if address % alignment or address < SMEM_BASE or address + n > SMEM_BASE + self.smem_bytes:
            raise SimulationError(f"{what}: {n} bytes at shared memory address {address:#x}")

    def shared_bytes(self, address, n):
        return self.smem[address - SMEM_BASE : address - SMEM_BASE + n]


def warpgroup(warp):
    """The four warps of a warp's warpgroup."""
    return range(warp // 4 * 4, warp // 4 * 4 + 4)
