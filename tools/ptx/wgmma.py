# SPDX-License-Identifier: Apache-2.0
"""wgmma: a warpgroup's products, run when they are waited for. Until then their accumulators hold NaN."""

import functools
import re
from typing import NamedTuple

import numpy as np

from tools.ptx.instruction import Vector
from tools.ptx.memory import descriptor_fields, operand_offsets
from tools.ptx.values import F32, F64, U32, SimulationError, Unsupported, halves, widen

NAN = U32(0x7FC00000)
M, K = 64, 16  # rows and depth of one instruction
SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}  # by the top two bits of a descriptor: none, 128, 64 and 32 bytes
_THREAD = np.arange(128)
ROW, COLUMN = 16 * (_THREAD // 32) + (_THREAD % 32) // 4, 2 * (_THREAD % 4)


@functools.cache
def accumulator_index(registers):
    """[row, column] of the 64 x N accumulator for (register, thread of the warpgroup)."""
    j = np.arange(registers)[:, None]
    return ROW[None, :] + 8 * (j // 2 % 2), 8 * (j // 4) + COLUMN[None, :] + j % 2


@functools.cache
def operand_index(steps):
    """[row, k] of an A operand in registers, of so many steps of k, for (register, thread, half)."""
    j = np.arange(4 * steps)[:, None, None]
    return ROW[None, :, None] + 8 * (j % 2), COLUMN[None, :, None] + np.arange(2) + 8 * (j // 2)


class Product(NamedTuple):
    """One wgmma instruction of one warpgroup."""

    warp: int  # the first of its four
    n: int
    form: str
    accumulator: tuple  # numbers of registers
    a: object  # a descriptor, or the numbers of registers
    b: int
    a_is_mn_major: int
    b_is_mn_major: int
    accumulates: bool
    signs: tuple
    place: int  # of the instruction

    @property
    def key(self):
        return self.warp, self.accumulator

    def continues(self, other):
        """Whether it adds to what the other makes, so that both are one product over a longer k."""
        same = self.key == other.key and (self.n, self.form, self.signs) == (other.n, other.form, other.signs)
        return same and self.accumulates and isinstance(self.a, tuple) == isinstance(other.a, tuple)


class Wgmma:
    """The products that the warpgroups of a block have issued, committed and not waited for."""

    def __init__(self, block):
        self.block = block

    def start(self):
        n = self.block.warps
        self.issued, self.groups, self.sums = [[] for _ in range(n)], [[] for _ in range(n)], {}

    def finish(self):
        for warp in range(self.block.warps):
            self.wait(warp, warp + 1, 0)

    def execute(self, i, first, end):
        """For the warps `first` to `end`, all of whose lanes are active."""
        if i.starts("wgmma.mma_async"):
            self.issue(i, first, end)
        elif i.starts("wgmma.commit_group"):
            for warp in range(first, end):
                self.groups[warp].append(self.issued[warp])
                self.issued[warp] = []
        elif i.starts("wgmma.wait_group"):
            left = int(i.args[0])
            done = [self.finished(warp, left) for warp in range(first, end)]
            if all(len(d) == len(done[0]) and all(x is y for x, y in zip(d, done[0])) for d in done):
                self.wait(first, end, left)
            else:
                for warp in range(first, end):
                    self.wait(warp, warp + 1, left)
        else:
            raise Unsupported(i.text)

    def finished(self, warp, left):
        """The products that a wait for all but the last `left` groups is for."""
        groups = self.groups[warp]
        return [product for group in groups[: max(0, len(groups) - left)] for product in group]

    def issue(self, i, first, end):
        """Take note of a product of each warpgroup. Its accumulator is NaN until it is waited for."""
        block, A, numbers = self.block, i.args, self.block.program.registers
        shape = re.search(r"m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)$", i.op)
        if not shape or shape[2] != shape[3]:
            raise Unsupported(i.text[:80])
        if first % 4 or end % 4:
            raise SimulationError("wgmma is not reached by a whole warpgroup at once")
        accumulator = tuple(numbers[r][1] for r in A[0].items)
        in_registers = isinstance(A[1], Vector)
        flags = [int(x) for x in A[4:]]
        majors = (0, flags[2]) if in_registers else (flags[2], flags[3])
        for warp in range(first, end, 4):
            threads = slice(32 * warp, 32 * warp + 128)
            a = tuple(numbers[r][1] for r in A[1].items) if in_registers else int(block.value(A[1], "D", warp)[0])
            b, accumulates = int(block.value(A[2], "D", warp)[0]), bool(block.value(A[3], "P", warp)[0])
            product = Product(warp, int(shape[1]), shape[2], accumulator, a, b, *majors, accumulates, tuple(flags[:2]), i.place)
            flying = [p for w in range(warp, warp + 4) for group in [*self.groups[w], self.issued[w]] for p in group]
            if any(p.key != product.key and not set(accumulator).isdisjoint(p.accumulator) for p in flying):
                raise Unsupported("wgmma on part of an accumulator that another is still making")
            rows = list(accumulator)
            if not any(p.key == product.key for p in flying):
                old = block.registers["U"][rows, threads].view(F32)
                self.sums[product.key] = old.copy() if accumulates else np.zeros((len(rows), 128), F32)
            block.registers["U"][rows, threads] = NAN
            for w in range(warp, warp + 4):
                self.issued[w].append(product)
            self.look(product, range(warp, warp + 4), True)

    def wait(self, first, end, left):
        """Run the products of all but the last `left` groups of these warps."""
        todo = {}
        for warp in range(first, end):
            while len(self.groups[warp]) > left:
                for product in self.groups[warp].pop(0):
                    todo.setdefault(id(product), (product, []))[1].append(warp)
        for product, warps in todo.values():
            self.look(product, warps, False)
        chains = []
        for product, warps in todo.values():
            if chains and chains[-1][1] == warps and product.continues(chains[-1][0][0]):
                chains[-1][0].append(product)
            else:
                chains.append(([product], warps))
        tiles = {}
        for products, warps in chains:
            self.run(products, warps, tiles)

    def look(self, product, warps, is_issue):
        """Each warp of a product reads all of its operands in shared memory."""
        if self.block.races is not None:
            operands = [(product.b, product.b_is_mn_major, product.n)]
            if not isinstance(product.a, tuple):
                operands.append((product.a, product.a_is_mn_major, M))
            for operand in operands:
                self.block.races.operand(product.place, self.block, list(warps), self.offsets(*operand), is_issue)

    def run(self, products, warps, tiles):
        """One product over the k of all of them; summed exactly, rounded once."""
        p, words = products[0], self.block.registers["U"]
        threads = slice(32 * p.warp, 32 * p.warp + 128)
        rows = list(p.accumulator)
        if isinstance(p.a, tuple):
            a = np.empty((M, K * len(products)))
            a[operand_index(len(products))] = halves(words[[r for x in products for r in x.a], threads], p.form)
        else:
            a = np.concatenate([self.tile(tiles, x.a, x.a_is_mn_major, M, p.form) for x in products], 1)
        b = np.concatenate([self.tile(tiles, x.b, x.b_is_mn_major, p.n, p.form) for x in products], 1)
        value = (a @ b.T)[accumulator_index(len(rows))]
        if p.signs[0] != p.signs[1]:
            value = -value
        total = self.sums[p.key]
        new = (value + total if p.accumulates else value).astype(F32)
        if len(warps) == 4:
            total[...] = new
            words[rows, threads] = new.view(U32)
            return
        for warp in warps:
            part = slice(32 * (warp - p.warp), 32 * (warp - p.warp) + 32)
            total[:, part] = new[:, part]
            words[rows, 32 * warp : 32 * warp + 32] = new[:, part].view(U32)

    def tile(self, tiles, descriptor, is_mn_major, rows, form):
        """An operand in shared memory as float64 [rows, K], read once for all products of a wait."""
        key = (descriptor, is_mn_major, rows)
        if key not in tiles:
            offsets = self.offsets(descriptor, is_mn_major, rows)
            tiles[key] = widen(self.block.smem_words[2][offsets >> 1], form).astype(F64)
        return tiles[key]

    def offsets(self, descriptor, is_mn_major, rows):
        """In bytes, of the elements of an operand in shared memory."""
        swizzle_bits = SWIZZLE_BITS[descriptor >> 62]
        offsets = operand_offsets(*descriptor_fields(descriptor), swizzle_bits, False, is_mn_major, rows, K, 2)
        if offsets.min() < 0 or offsets.max() + 2 > self.block.smem_bytes:
            raise SimulationError(f"a wgmma descriptor reaches shared memory {offsets.min():#x}..{offsets.max():#x}")
        return offsets
