# SPDX-License-Identifier: Apache-2.0
"""tcgen05 and tensor memory: 128 lanes times 512 columns of 32 bits.

Products and their commits happen at issue or when nothing else can go on, as the order says; with late products a tcgen05.st
lands at its wait. A register that a tcgen05.ld fills may be moved before the wait, and not used. Known from NVIDIA's own
sources and what the DSL emits; not compared with hardware yet. Where they leave a choice, the stricter one is taken.

With cta_group::2 (PTX ISA 9.2, 9.7.16) two blocks whose ranks in the cluster differ in the last bit are a pair, and share these:

| instruction      | what is modelled                                                                                           |
|------------------|------------------------------------------------------------------------------------------------------------|
| alloc, dealloc   | a warp of each block takes part, and waits for the other; both get the same columns                        |
| mma              | issued by one thread of the block with the even rank. Each block has half of the rows of A and of D, and   |
|                  | half of the N rows of B, at the same addresses. M = 256: D as of M = 128 in each ("layout A", 9.7.16.10.5). |
|                  | M = 128: 64 rows in each, the second half of the columns in lanes 64 to 127 ("layout B")                    |
| commit           | with a mask, one arrival at the mbarrier of the same address in each block that it names                   |

Tensor memory is read and written by a block's own warps. All tcgen05 instructions of a kernel have the same cta_group.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tools.ptx.barriers import Wait
from tools.ptx.instruction import Address, Vector
from tools.ptx.memory import descriptor_fields, operand_offsets
from tools.ptx.values import F32, F64, LANES, U16, U32, SimulationError, Unsupported, to_tf32, widen

EMPTY = 0xFFFFFFFF  # NaN
LANE_COUNT, COLUMN_COUNT = 128, 512
ALLOCATIONS = (32, 64, 128, 256, 512)  # columns
# The method of an instruction, by the word behind `tcgen05`.
METHODS = {
    "alloc": "allocate",
    "dealloc": "free",
    "relinquish_alloc_permit": "relinquish",
    "ld": "move",
    "st": "move",
    "wait::ld": "wait_loads",
    "wait::st": "wait_stores",
    "mma": "issue",
    "commit": "commit",
}
WARP_WIDE = ("alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st")
KINDS = ("f16", "tf32")  # of products
F16, BF16, TF32 = 0, 1, 2  # formats of operands in an instruction descriptor
F32_SUM = 1  # and of the accumulator
OPERAND_COLUMNS = 8  # of tensor memory, that the 32 bytes of a row of A take
# The top three bits of a shared memory descriptor: the bits of the swizzle, by its mode; two modes swizzle 128 bytes.
SWIZZLE_AT, SWIZZLE_BITS = 61, {0: 0, 1: 3, 2: 3, 4: 2, 6: 1}
WIDE_ATOMS = 1  # the mode that moves pieces of 32 bytes, not 16


class Mma(NamedTuple):
    """The operands of one tcgen05.mma."""

    to: int  # an address of tensor memory: a lane in the upper half, a column in the lower
    a: int  # likewise, or a descriptor
    a_in_tmem: bool
    b: int  # a descriptor
    form: "InstructionDescriptor"
    is_disabled: np.ndarray  # for each lane of tensor memory, of both blocks of a pair, whether the result leaves it alone
    accumulates: bool


class Request:
    """Columns that a warp asks for, or gives back."""

    def __init__(self, n, at):
        self.n, self.at, self.is_done = n, at, False  # `at`: where to write the column to, or the column


class Part(NamedTuple):
    """What a block has of a product."""

    block: Any
    read_a: Callable[[], np.ndarray]  # [M or M / 2, K]
    read_b: Callable[[], np.ndarray]  # [N or N / 2, K]
    write: Callable[[np.ndarray], None]  # its rows of D
    offsets: list[np.ndarray]  # of operands in its shared memory


class TensorMemory:
    """Tensor memory of a block's SM, and the products that go there."""

    def __init__(self, block):
        self.block = block

    def start(self):
        n = self.block.warps
        self.cells = np.full((LANE_COUNT, COLUMN_COUNT), EMPTY, U32)
        self.is_allocated = np.zeros(COLUMN_COUNT, bool)
        self.allocations, self.may_allocate = {}, True
        self.group, self.asked, self.given_back = None, None, None  # cta_group; requests that wait for the partner's
        self.queues = {}  # products a thread has issued and not committed
        self.loads, self.stores = [[] for _ in range(n)], [[] for _ in range(n)]
        self.pending = [set() for _ in range(n)]  # registers of loads not waited for

    def finish(self):
        for warp in range(self.block.warps):
            self.land_loads(warp)
            self.land_stores(warp)
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
        """An instruction of a warp's active lanes; a Wait if the warp must wait."""
        kind = i.parts[1]
        if kind not in METHODS:
            raise Unsupported(i.text[:100])
        if (group := re.search(r"cta_group::(\d)", i.op)) is not None:
            if self.group not in (None, group[1]):
                raise SimulationError(f"{i.op} in a kernel that has used cta_group::{self.group}")
            self.group = group[1]
        if kind in WARP_WIDE and not lanes.all():
            raise SimulationError(f"{i.op} in divergent code")
        return getattr(self, METHODS[kind])(i, warp, lanes)

    # Columns.

    def check_columns(self, first, n, what):
        if first + n > COLUMN_COUNT or not self.is_allocated[first : first + n].all():
            raise SimulationError(f"{what}: tensor memory columns {first}..{first + n - 1} are not allocated")

    def members(self):
        """The tensor memories that an instruction is about: one's own, or those of the pair, the one with the even rank first."""
        blocks, rank = self.block.cluster.blocks, self.block.rank
        if self.group != "2":
            return [self]
        if rank | 1 >= len(blocks):
            raise SimulationError(f"cta_group::2 in block {self.block.index}, which has no partner in a cluster of {len(blocks)}")
        return [blocks[rank & ~1].tmem, blocks[rank | 1].tmem]

    def allocate(self, i, warp, lanes):
        """Columns for a warp, whose first it finds in shared memory; it waits until there are so many."""
        block = self.block
        n = block.uniform(block.value(i.args[1], "U", warp), lanes, "the number of columns")
        if n not in ALLOCATIONS:
            raise SimulationError(f"tcgen05.alloc of {n} columns: must be a power of two from 32 to 512")
        if not self.may_allocate:
            raise SimulationError("tcgen05.alloc after relinquish_alloc_permit")
        request = self.asked = Request(n, block.uniform(block.address(i.args[0], warp), lanes, "an address"))
        members = self.members()

        def is_free(column):
            return not any(member.is_allocated[column : column + n].any() for member in members)

        def grant():
            if request.is_done or any(member.asked is None for member in members):
                return request.is_done
            if len({member.asked.n for member in members}) > 1:
                raise SimulationError(f"the blocks of a pair allocate {[member.asked.n for member in members]} columns")
            # From the top: the first allocation is not at column 0, so code that forgets where it is shows.
            column = next((c for c in range(COLUMN_COUNT - n, -1, -n) if is_free(c)), None)
            if column is None:
                return False
            for member in members:
                member.take(column)
            return True

        return None if grant() else Wait(grant)

    def take(self, column):
        """Have the columns that were asked for."""
        request, self.asked = self.asked, None
        self.is_allocated[column : column + request.n] = True
        self.allocations[column] = request.n
        words, at = self.block.locate("shared", np.array([request.at]), 4, 1)
        words[at] = column
        request.is_done = True

    def relinquish(self, i, warp, lanes):
        self.may_allocate = False

    def free(self, i, warp, lanes):
        block = self.block
        column = block.uniform(block.value(i.args[0], "U", warp), lanes, "an address")
        n = block.uniform(block.value(i.args[1], "U", warp), lanes, "the number of columns")
        if self.allocations.get(column) != n:
            raise SimulationError(f"tcgen05.dealloc of {n} columns at {column:#x}; allocated: {self.allocations}")
        request = self.given_back = Request(n, column)
        members = self.members()

        def give_back():
            if not request.is_done and all(member.given_back is not None for member in members):
                for member in members:
                    member.drop()
            return request.is_done

        return None if give_back() else Wait(give_back)

    def drop(self):
        """Have no longer the columns that were given back."""
        request, self.given_back = self.given_back, None
        del self.allocations[request.at]
        self.is_allocated[request.at : request.at + request.n] = False
        self.cells[:, request.at : request.at + request.n] = EMPTY
        request.is_done = True

    # Registers from and to tensor memory.

    def move(self, i, warp, lanes):
        """tcgen05.ld and st: a warp reaches the 32 lanes that its number modulo 4 says."""
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

    def wait_loads(self, i, warp, lanes):
        self.land_loads(warp)

    def wait_stores(self, i, warp, lanes):
        self.land_stores(warp)

    def land_loads(self, warp):
        """What a warp's loads read must still be there: until the wait they may read at any time."""
        for cells, got, op in self.loads[warp]:
            if (self.cells[cells] != got).any():
                raise SimulationError(f"tensor memory changed under a {op} before its wait")
        self.loads[warp], self.pending[warp] = [], set()

    def land_stores(self, warp):
        """Write what a warp has stored and not waited for."""
        for cells, values in self.stores[warp]:
            self.cells[cells] = values
        self.stores[warp] = []

    # Products.

    def issue(self, i, warp, lanes):
        """tcgen05.mma, by one thread."""
        if lanes.sum() != 1:
            raise SimulationError("tcgen05.mma is issued by more than one lane: each would run it")
        if self.group == "2" and self.block.rank % 2:
            raise SimulationError(
                f"{i.op} is issued by block {self.block.index}, which has an odd rank: its partner issues for both"
            )
        lane = int(np.argmax(lanes))
        product = self.product(i, warp, lane)
        if self.block.order.late_products:
            self.queues.setdefault((warp, lane), []).append(product)
        else:
            product()

    def commit(self, i, warp, lanes):
        addresses, block = self.block.address(i.args[0], warp), self.block
        for lane in np.flatnonzero(lanes):
            if "multicast::cluster" in i.parts:
                _, there = block.cluster.owner(block, addresses[lane])
                named = block.cluster.named(int(block.value(i.args[1], "H", warp)[lane]), addresses[lane])
                barriers = [owner.barriers.find(there) for owner in named]
            else:
                barriers = [block.barriers.find_in_cluster(addresses[lane])]
            self.commit_lane(i, (warp, int(lane)), barriers)

    def commit_lane(self, i, thread, barriers):
        """Each mbarrier gets one arrival when everything THIS thread issued before has completed."""
        work, block = self.queues.pop(thread, []), self.block
        clock = None if block.races is None else block.races.issue(block, thread[0], i.place)

        def arrive():
            for product in work:
                product()
            for barrier in barriers:
                barrier.know(clock)
                barrier.arrive()

        if block.order.late_products:
            block.cluster.events.append(arrive)
        else:
            arrive()

    def decode(self, i, warp, lane):
        """The operands of a tcgen05.mma."""
        block = self.block
        kind = re.search(r"kind::(\w+)", i.op)[1]
        if kind not in KINDS or re.search(r"\.(ws|sp|block_scale|ashift)\b", i.op):
            raise Unsupported(i.op)
        one = lambda operand, view: int(block.value(operand, view, warp)[lane])
        where = lambda operand: int(block.address(operand, warp)[lane])
        a_in_tmem = isinstance(i.args[1], Address)
        a = where(i.args[1]) if a_in_tmem else one(i.args[1], "D")
        form = InstructionDescriptor(one(i.args[3], "U"), kind, int(self.group))
        rest, lane_count = i.args[4:], LANE_COUNT * form.blocks
        is_disabled = np.zeros(lane_count, bool)
        if isinstance(rest[0], Vector):  # a set bit leaves that lane of the result alone
            words = [one(x, "U") for x in rest[0].items]
            is_disabled = np.array([words[n >> 5] >> (n & 31) & 1 for n in range(lane_count)], bool)
            rest = rest[1:]
        accumulates = bool(block.value(rest[0], "P", warp)[lane])
        if len(rest) > 1 and rest[1] != "0":
            raise Unsupported("tcgen05.mma with scale-input-d")
        return Mma(where(i.args[0]), a, a_in_tmem, one(i.args[2], "D"), form, is_disabled, accumulates)

    def product(self, i, warp, lane):
        """tcgen05.mma: decoded and checked now, computed when the result is called."""
        mma, members = self.decode(i, warp, lane), self.members()
        disabled = np.split(mma.is_disabled, len(members))
        parts = [member.part(mma, is_disabled) for member, is_disabled in zip(members, disabled)]
        for part in parts if self.block.races is not None else ():
            for offsets in part.offsets:
                self.block.races.issued_operand(i.place, self.block, warp, part.block, offsets)

        def compute():
            for part in parts:
                if part.block.has_ended() and part.block is not self.block:
                    raise SimulationError(f"a product of a pair when block {part.block.index} has ended")
            A, B = (np.concatenate([read() for read in reads]) for reads in zip(*((p.read_a, p.read_b) for p in parts)))
            D = A.astype(F64) @ B.astype(F64).T
            for part, rows in zip(parts, np.split(-D if mma.form.negates else D, len(parts))):
                part.write(rows)

        return compute

    def part(self, mma, is_disabled):
        """What this block has of a product: of A and D its rows, of B its half of the other dimension."""
        form = mma.form
        lanes, column = form.lanes(mma.to >> 16, "D"), mma.to & 0xFFFF
        self.check_columns(column, form.columns, "tcgen05.mma D")
        keep, columns = ~is_disabled[lanes], slice(column, column + form.columns)
        b = self.offsets(mma.b, form, form.b_is_mn, form.N // form.blocks)
        a = None if mma.a_in_tmem else self.offsets(mma.a, form, form.a_is_mn, form.M // form.blocks)
        read_a = self.operand_in_tmem(mma.a, form) if a is None else self.operand_in_smem(a, form, form.a_format)

        def write(rows):
            D = form.fold(rows)
            if mma.accumulates:
                D = D + self.cells[lanes, columns].view(F32)
            self.cells[lanes[keep], columns] = D.astype(F32).view(U32)[keep]

        return Part(self.block, read_a, self.operand_in_smem(b, form, form.b_format), write, [b] if a is None else [a, b])

    def operand_in_tmem(self, address, form):
        """A function that reads A [M, K] from tensor memory. 16-bit operands lie two in a column, the low half first."""
        if form.a_is_mn:
            raise SimulationError("tcgen05.mma with A in tensor memory must be K-major")
        if form.blocks == 2:
            raise Unsupported("tcgen05.mma of a pair with A in tensor memory")
        lanes, column = form.lanes(address >> 16, "A"), address & 0xFFFF
        self.check_columns(column, OPERAND_COLUMNS, "tcgen05.mma A")

        def read():
            cells = np.ascontiguousarray(self.cells[lanes, column : column + OPERAND_COLUMNS])
            return form.number(cells if form.element == 4 else cells.view(U16), form.a_format)

        return read

    def operand_in_smem(self, offsets, form, number_format):
        """A function that reads an operand [rows, K] from shared memory."""
        smem = self.block.smem_words[form.element]
        return lambda: form.number(smem[offsets // form.element], number_format)

    def offsets(self, descriptor, form, is_mn, rows):
        """In bytes, of an operand in shared memory. A tcgen05 descriptor has other swizzle codes than wgmma's, and a version."""
        mode, element = descriptor >> SWIZZLE_AT, form.element
        if element == 4 and is_mn and mode != WIDE_ATOMS:
            # The DSL builds such descriptors without a word.
            raise SimulationError("an MN-major tf32 operand: only the 128-byte swizzle of 32-byte pieces exists")
        if mode not in SWIZZLE_BITS:
            raise SimulationError(f"tcgen05 descriptor {descriptor:#x}: swizzle mode {mode}")
        if descriptor >> 46 & 3 != 1:
            raise SimulationError(f"tcgen05 descriptor {descriptor:#x}: bits 46 and 47 must be 01")
        if descriptor >> 52 & 1 or descriptor >> 49 & 7:
            raise Unsupported("a tcgen05 descriptor with an absolute leading offset or a base offset")
        atoms = SWIZZLE_BITS[mode], mode == WIDE_ATOMS
        found = operand_offsets(*descriptor_fields(descriptor), *atoms, is_mn, rows, form.K, element)
        if found.min() < 0 or found.max() + element > self.block.smem_bytes:
            raise SimulationError(f"a tcgen05.mma descriptor reaches shared memory {found.min():#x}..{found.max():#x}")
        return found


class InstructionDescriptor:
    """The 32 bits that say what a tcgen05.mma multiplies."""

    # The first bit of each field, and how many it has.
    FIELDS = {
        "sparse": (2, 1), "saturates": (3, 1), "sum_format": (4, 2), "reserved_6": (6, 1), "a_format": (7, 3),
        "b_format": (10, 3), "negates_a": (13, 1), "negates_b": (14, 1), "a_is_mn": (15, 1), "b_is_mn": (16, 1),
        "n_over_8": (17, 6), "reserved_23": (23, 1), "m_over_16": (24, 5), "reserved_29": (29, 1), "shift": (30, 2),
    }  # fmt: skip
    MUST_BE_ZERO = ("sparse", "saturates", "reserved_6", "reserved_23", "reserved_29", "shift")

    def __init__(self, word, kind, blocks=1):
        field = {name: word >> low & ((1 << n) - 1) for name, (low, n) in self.FIELDS.items()}
        if any(field[name] for name in self.MUST_BE_ZERO):
            raise Unsupported(f"instruction descriptor {word:#x}: sparse, saturating, shifted or reserved bits set")
        if field["sum_format"] != F32_SUM:
            said = f"accumulator format {field['sum_format']}; only f32 ({F32_SUM}) is known"
            raise Unsupported(f"instruction descriptor {word:#x}: {said}")
        self.a_format, self.b_format = field["a_format"], field["b_format"]
        self.negates = field["negates_a"] != field["negates_b"]
        self.a_is_mn, self.b_is_mn = field["a_is_mn"], field["b_is_mn"]
        self.M, self.N = 16 * field["m_over_16"], 8 * field["n_over_8"]
        self.element = 2 if kind == "f16" else 4
        self.K = 32 // self.element
        formats = {self.a_format, self.b_format}
        if not formats <= ({F16, BF16} if kind == "f16" else {TF32}):
            raise SimulationError(f"instruction descriptor {word:#x}: operand formats {formats} with kind::{kind}")
        self.blocks = blocks  # that share the product
        self.is_folded = blocks == 2 and self.M == 128
        self.columns = self.N // 2 if self.is_folded else self.N  # of tensor memory, that D takes
        shapes = {64: 8, 128: 16} if blocks == 1 else {128: 32, 256: 32}  # M, and what N is a multiple of
        step = shapes.get(self.M)
        if step is None or not step <= self.N <= 256 or self.N % step:
            of = "" if blocks == 1 else " of a pair"
            raise SimulationError(f"instruction descriptor {word:#x}: M {self.M} N {self.N}{of}")

    def number(self, raw, code):
        """Bits of an operand as float32."""
        return to_tf32(raw) if self.element == 4 else widen(raw, "bf16" if code == BF16 else "f16")

    def lanes(self, first, what):
        """The lanes of the rows, or of both halves of folded ones. M = 64: 16 rows in every 32 lanes, the lower or the upper
        half; otherwise a row, or half of one, has its own."""
        if (self.M != 64 and first) or (self.M == 64 and first not in (0, 16)):
            raise SimulationError(f"tcgen05.mma {what} at lane {first} with M = {self.M}")
        row = np.arange(64 if self.M == 64 else LANE_COUNT)
        return row // 16 * 32 + row % 16 + first if self.M == 64 else row

    def fold(self, rows):
        """Rows of D as they lie in a block's lanes: with 64 of them, the second half of the columns below the first."""
        return np.concatenate(np.split(rows, 2, axis=1)) if self.is_folded else rows


def fragment(shape, registers):
    """Lane and column of each (register, lane of the warp); registers and columns of one repetition."""
    r, l = np.arange(registers)[:, None], LANES[None, :]
    return {
        "32x32b": lambda: (l + 0 * r, r + 0 * l, 1, 1),
        "16x64b": lambda: (l // 4 + 8 * (l % 2) + 0 * r, l // 2 % 2 + 2 * r, 1, 2),
        "16x128b": lambda: (l // 4 + 8 * (r % 2), l % 4 + 4 * (r // 2), 2, 4),
        "16x256b": lambda: (l // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r // 4), 4, 8),
    }[shape]()
