# SPDX-License-Identifier: Apache-2.0
"""tcgen05 and tensor memory: 128 lanes times 512 columns of 32 bits.

Products and their commits happen at issue or when nothing else can go on, as the order says; with late products a tcgen05.st
lands at its wait. A register that a tcgen05.ld fills may be moved before the wait, and not used. Known from NVIDIA's own
sources and what the DSL emits; not compared with hardware yet. Where they leave a choice, the stricter one is taken.
"""

import re

import numpy as np

from tools.ptx.barriers import Wait
from tools.ptx.instruction import Address, Vector
from tools.ptx.memory import descriptor_fields, operand_offsets
from tools.ptx.values import F32, F64, LANES, U16, U32, SimulationError, Unsupported, to_tf32, widen

EMPTY = 0xFFFFFFFF  # NaN
LANE_COUNT, COLUMN_COUNT = 128, 512
WARP_WIDE = ("alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st")


class TensorMemory:
    def __init__(self, block):
        self.block = block

    def start(self):
        n = self.block.warps
        self.cells = np.full((LANE_COUNT, COLUMN_COUNT), EMPTY, U32)
        self.is_allocated = np.zeros(COLUMN_COUNT, bool)
        self.allocations, self.may_allocate = {}, True
        self.queues = {}  # products a thread has issued and not committed
        self.loads, self.stores = [[] for _ in range(n)], [[] for _ in range(n)]
        self.pending = [set() for _ in range(n)]  # registers of loads not waited for

    def finish(self):
        for warp in range(self.block.warps):
            self.wait_loads(warp)
            self.wait_stores(warp)
        if self.allocations:
            raise SimulationError(f"tensor memory is not freed at exit: columns {sorted(self.allocations)}")

    def follow(self, warp, instructions):
        """Moves may carry a register that a load has not delivered yet; nothing else may use it."""
        pending = self.pending[warp]
        for i in instructions:
            if i.reads & pending:
                if not i.is_move:
                    raise SimulationError(f"a register of a tcgen05.ld is used before tcgen05.wait::ld: {i.text[:80]}")
                pending |= i.writes
            else:
                pending -= i.writes

    def execute(self, i, warp, lanes):
        kind = i.parts[1]
        if "cta_group::2" in i.op or "multicast" in i.op:
            raise Unsupported(i.op)
        if kind in WARP_WIDE and not lanes.all():
            raise SimulationError(f"{i.op} in divergent code")
        if kind == "alloc":
            return self.allocate(i, warp, lanes)
        if kind == "dealloc":
            self.free(i, warp, lanes)
        elif kind == "relinquish_alloc_permit":
            self.may_allocate = False
        elif kind in ("ld", "st"):
            self.move(i, warp, lanes)
        elif kind == "wait::ld":
            self.wait_loads(warp)
        elif kind == "wait::st":
            self.wait_stores(warp)
        elif kind == "commit":
            addresses = self.block.address(i.args[0], warp)
            for lane in np.flatnonzero(lanes):
                self.commit(i, (warp, int(lane)), self.block.barriers.find_in_cluster(addresses[lane]))
        elif kind == "mma":
            if lanes.sum() != 1:
                raise SimulationError("tcgen05.mma is issued by more than one lane: each would run it")
            lane = int(np.argmax(lanes))
            product = self.product(i, warp, lane)
            if self.block.order.late_products:
                self.queues.setdefault((warp, lane), []).append(product)
            else:
                product()
        else:
            raise Unsupported(i.text[:100])
        return None

    # Columns.

    def check_columns(self, first, n, what):
        if first + n > COLUMN_COUNT or not self.is_allocated[first : first + n].all():
            raise SimulationError(f"{what}: tensor memory columns {first}..{first + n - 1} are not allocated")

    def allocate(self, i, warp, lanes):
        block = self.block
        n = block.uniform(block.value(i.args[1], "U", warp), lanes, "the number of columns")
        if n not in (32, 64, 128, 256, 512):
            raise SimulationError(f"tcgen05.alloc of {n} columns: must be a power of two from 32 to 512")
        if not self.may_allocate:
            raise SimulationError("tcgen05.alloc after relinquish_alloc_permit")
        to = block.uniform(block.address(i.args[0], warp), lanes, "an address")

        def free_place():
            # From the top: the first allocation is not at column 0, so code that forgets where it is shows.
            return next((c for c in range(COLUMN_COUNT - n, -1, -n) if not self.is_allocated[c : c + n].any()), None)

        def grant():
            column = free_place()
            if column is None:
                return False
            self.is_allocated[column : column + n] = True
            self.allocations[column] = n
            words, at = block.locate("shared", np.array([to]), 4, 1)
            words[at] = column
            return True

        return None if grant() else Wait(grant)

    def free(self, i, warp, lanes):
        block = self.block
        column = block.uniform(block.value(i.args[0], "U", warp), lanes, "an address")
        n = block.uniform(block.value(i.args[1], "U", warp), lanes, "the number of columns")
        if self.allocations.get(column) != n:
            raise SimulationError(f"tcgen05.dealloc of {n} columns at {column:#x}; allocated: {self.allocations}")
        del self.allocations[column]
        self.is_allocated[column : column + n] = False
        self.cells[:, column : column + n] = EMPTY

    # Registers from and to tensor memory.

    def move(self, i, warp, lanes):
        block, is_load = self.block, i.parts[1] == "ld"
        registers, address = i.args[:2] if is_load else i.args[1::-1]
        registers = registers.items if isinstance(registers, Vector) else (registers,)
        shape = re.search(r"\.(32x32b|16x64b|16x128b|16x256b)\.x(\d+)", i.op)
        if not shape or "pack::16b" in i.op or "unpack::16b" in i.op or "red" in i.parts:
            raise Unsupported(i.op)
        at = block.uniform(block.address(address, warp), lanes, "a tensor memory address")
        lane, column, n = at >> 16, at & 0xFFFF, int(shape[2])
        row, across, per, wide = fragment(shape[1], len(registers))
        if len(registers) != per * n:
            raise SimulationError(f"{i.op}: {len(registers)} registers, {per * n} expected")
        window = 32 * (warp % 4)
        if lane != window and not (shape[1] != "32x32b" and lane == window + 16):
            raise SimulationError(f"{i.op}: warp {warp} may use lanes {window}..{window + 31}, the address has lane {lane}")
        self.check_columns(column, wide * n, i.op)
        cells = (lane + row, column + across)
        if is_load:
            got = self.cells[cells]
            rows = [block.program.registers[name][1] for name in registers]
            block.registers["U"][rows, 32 * warp : 32 * warp + 32] = got
            self.loads[warp].append((cells, got, i.op))
            self.pending[warp] |= set(registers)
            return
        values = np.stack([block.value(name, "U", warp) for name in registers])
        if block.order.late_products:
            self.stores[warp].append((cells, values))
        else:
            self.cells[cells] = values

    def wait_loads(self, warp):
        for cells, got, op in self.loads[warp]:
            if (self.cells[cells] != got).any():
                raise SimulationError(f"tensor memory changed under a {op} before its wait")
        self.loads[warp], self.pending[warp] = [], set()

    def wait_stores(self, warp):
        for cells, values in self.stores[warp]:
            self.cells[cells] = values
        self.stores[warp] = []

    # Products.

    def commit(self, i, thread, barrier):
        """The mbarrier gets one arrival when everything THIS thread issued before has completed."""
        work, block = self.queues.pop(thread, []), self.block
        clock = None if block.races is None else block.races.issue(block, thread[0], i.place)

        def arrive():
            for product in work:
                product()
            barrier.know(clock)
            barrier.arrive()

        if block.order.late_products:
            block.cluster.events.append(arrive)
        else:
            arrive()

    def product(self, i, warp, lane):
        """tcgen05.mma: decoded and checked now, computed when the result is called."""
        block = self.block
        kind = re.search(r"kind::(\w+)", i.op)[1]
        if kind not in ("f16", "tf32") or re.search(r"\.(ws|sp|block_scale|ashift)\b", i.op):
            raise Unsupported(i.op)
        one = lambda operand, view: int(block.value(operand, view, warp)[lane])
        where = lambda operand: int(block.address(operand, warp)[lane])
        to, a_in_tmem = where(i.args[0]), isinstance(i.args[1], Address)
        a = where(i.args[1]) if a_in_tmem else one(i.args[1], "D")
        b, form = one(i.args[2], "D"), InstructionDescriptor(one(i.args[3], "U"), kind)
        rest, is_disabled = i.args[4:], np.zeros(LANE_COUNT, bool)
        if isinstance(rest[0], Vector):  # a set bit leaves that lane of the result alone
            words = [one(x, "U") for x in rest[0].items]
            is_disabled = np.array([words[n >> 5] >> (n & 31) & 1 for n in range(LANE_COUNT)], bool)
            rest = rest[1:]
        accumulates = bool(block.value(rest[0], "P", warp)[lane])
        if len(rest) > 1 and rest[1] != "0":
            raise Unsupported("tcgen05.mma with scale-input-d")
        M, N, K, element = form.M, form.N, form.K, form.element
        if element == 4 and ((form.a_is_mn and not a_in_tmem and a >> 61 != 1) or (form.b_is_mn and b >> 61 != 1)):
            # The DSL builds such descriptors without a word.
            raise SimulationError("an MN-major tf32 operand: only the 128-byte swizzle of 32-byte pieces exists")
        to_lanes, to_column = form.lanes(to >> 16, "D"), to & 0xFFFF
        self.check_columns(to_column, N, "tcgen05.mma D")
        if a_in_tmem:
            if form.a_is_mn:
                raise SimulationError("tcgen05.mma with A in tensor memory must be K-major")
            a_lanes, a_column = form.lanes(a >> 16, "A"), a & 0xFFFF
            self.check_columns(a_column, 8, "tcgen05.mma A")
        else:
            a_offsets = self.offsets(a, form.a_is_mn, M, K, element)
        b_offsets = self.offsets(b, form.b_is_mn, N, K, element)
        smem = block.smem_words[element]

        def compute():
            if a_in_tmem:  # 16-bit operands lie two in a column, the low half first
                cells = np.ascontiguousarray(self.cells[a_lanes, a_column : a_column + 8])
                A = form.number(cells if element == 4 else cells.view(U16), form.a_format)
            else:
                A = form.number(smem[a_offsets // element], form.a_format)
            B = form.number(smem[b_offsets // element], form.b_format)
            D = A.astype(F64) @ B.astype(F64).T
            if form.negates:
                D = -D
            if accumulates:
                D = D + self.cells[to_lanes, to_column : to_column + N].view(F32)
            keep = ~is_disabled[to_lanes]
            self.cells[to_lanes[keep], to_column : to_column + N] = D.astype(F32).view(U32)[keep]

        return compute

    def offsets(self, descriptor, is_mn, rows, k, element):
        """A tcgen05 descriptor: other swizzle codes than wgmma's, and a version field."""
        mode = descriptor >> 61
        if mode not in (0, 1, 2, 4, 6):
            raise SimulationError(f"tcgen05 descriptor {descriptor:#x}: swizzle mode {mode}")
        if descriptor >> 46 & 3 != 1:
            raise SimulationError(f"tcgen05 descriptor {descriptor:#x}: bits 46 and 47 must be 01")
        if descriptor >> 52 & 1 or descriptor >> 49 & 7:
            raise Unsupported("a tcgen05 descriptor with an absolute leading offset or a base offset")
        bits = {0: 0, 1: 3, 2: 3, 4: 2, 6: 1}[mode]
        found = operand_offsets(*descriptor_fields(descriptor), bits, mode == 1, is_mn, rows, k, element)
        if found.min() < 0 or found.max() + element > self.block.smem_bytes:
            raise SimulationError(f"a tcgen05.mma descriptor reaches shared memory {found.min():#x}..{found.max():#x}")
        return found


class InstructionDescriptor:
    """The 32 bits that say what a tcgen05.mma multiplies."""

    def __init__(self, word, kind):
        bits = lambda low, n: word >> low & ((1 << n) - 1)
        if any(bits(*field) for field in ((2, 1), (3, 1), (6, 1), (23, 1), (29, 1), (30, 2))):
            raise Unsupported(f"instruction descriptor {word:#x}: sparse, saturating, shifted or reserved bits set")
        if bits(4, 2) != 1:
            raise Unsupported(f"instruction descriptor {word:#x}: accumulator format {bits(4, 2)}; only f32 (1) is known")
        self.a_format, self.b_format = bits(7, 3), bits(10, 3)
        self.negates = bits(13, 1) != bits(14, 1)
        self.a_is_mn, self.b_is_mn = bits(15, 1), bits(16, 1)
        self.M, self.N = 16 * bits(24, 5), 8 * bits(17, 6)
        self.element = 2 if kind == "f16" else 4
        self.K = 32 // self.element
        formats = {self.a_format, self.b_format}
        if not formats <= ({0, 1} if kind == "f16" else {2}):
            raise SimulationError(f"instruction descriptor {word:#x}: operand formats {formats} with kind::{kind}")
        step = 8 if self.M == 64 else 16
        if self.M not in (64, 128) or not step <= self.N <= 256 or self.N % step:
            raise SimulationError(f"instruction descriptor {word:#x}: M {self.M} N {self.N}")

    def number(self, raw, code):
        return to_tf32(raw) if self.element == 4 else widen(raw, "bf16" if code else "f16")

    def lanes(self, first, what):
        """The lanes of the rows. M = 128: its own; M = 64: 16 rows in every 32 lanes, the lower or the upper half."""
        if (self.M == 128 and first) or (self.M == 64 and first not in (0, 16)):
            raise SimulationError(f"tcgen05.mma {what} at lane {first} with M = {self.M}")
        row = np.arange(self.M)
        return row if self.M == 128 else row // 16 * 32 + row % 16 + first


def fragment(shape, registers):
    """Lane and column of each (register, lane of the warp); registers and columns of one repetition."""
    r, l = np.arange(registers)[:, None], LANES[None, :]
    return {
        "32x32b": lambda: (l + 0 * r, r + 0 * l, 1, 1),
        "16x64b": lambda: (l // 4 + 8 * (l % 2) + 0 * r, l // 2 % 2 + 2 * r, 1, 2),
        "16x128b": lambda: (l // 4 + 8 * (r % 2), l % 4 + 4 * (r // 2), 2, 4),
        "16x256b": lambda: (l // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r // 4), 4, 8),
    }[shape]()
