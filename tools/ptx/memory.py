# SPDX-License-Identifier: Apache-2.0
"""Global memory, TMA descriptors, and how tensor-core operands lie in shared memory."""

import functools
import struct

import numpy as np

from tools.ptx.values import GMEM_BASE, S64, SMEM_BASE, SimulationError, Unsupported


class GlobalMemory:
    """numpy arrays at made-up addresses, with gaps between them in which no access is allowed."""

    GAP = 4096

    def __init__(self, size):
        self.bytes = np.zeros(size, np.uint8)
        self.live = np.zeros(size, bool)
        self.top = 0
        self.words = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4, 8)}

    @classmethod
    def room_for(cls, sizes):
        """Memory for arrays of so many bytes."""
        return cls(sum(-(-(size + cls.GAP) // 1024) * 1024 for size in sizes) + 1024)

    def put(self, array):
        """Copy an array in; its address and its live copy."""
        raw = np.ascontiguousarray(array)
        start, n = self.top, raw.nbytes
        self.bytes[start : start + n] = raw.view(np.uint8).reshape(-1)
        self.live[start : start + n] = True
        self.top += -(-(n + self.GAP) // 1024) * 1024
        return GMEM_BASE + start, self.bytes[start : start + n].view(raw.dtype).reshape(raw.shape)

    def check(self, offsets, width, what):
        """Every access of `width` bytes lies in an array."""
        good = (offsets >= 0) & (offsets + width <= self.top)
        if good.all():
            good = self.live[offsets] & self.live[offsets + width - 1]
        if not good.all():
            raise SimulationError(f"{what} outside every array, at {int(offsets[~good][0]) + GMEM_BASE:#x}")


def swizzle(address, bits):
    """The number of a 16-byte piece xor the number of its 128-byte row; bits 1, 2, 3: swizzles of 32, 64, 128 bytes."""
    return address ^ ((address >> 3) & (((1 << bits) - 1) << 4))


# Formats of elements and their bytes, by the code of the format.
FORMATS = (
    ("u8", 1), ("u16", 2), ("u32", 4), ("s32", 4), ("u64", 8), ("s64", 8), ("f16", 2), ("f32", 4), ("f32.ftz", 4), ("f64", 8),
    ("bf16", 2),
)  # fmt: skip


class TensorMap:
    """The 128-byte TMA descriptor, from its bits.

    The layout is not documented. These fields were read off what cuTensorMapEncodeTiled makes (driver 580) by changing one
    argument at a time; the DSL's host code builds the same words itself. Bits 1 and 21 of word 1, which only the DSL sets,
    and words 8 to 15 are not understood and not used. Dimensions go from the fastest to the slowest.
    """

    def __init__(self, raw):
        w = struct.unpack("<16Q", raw)
        self.address = w[0]
        self.rank = (w[1] >> 4 & 7) + 1
        code = w[1] >> 7 & 15
        if code >= len(FORMATS):
            raise Unsupported(f"TMA of elements of format {code}")
        self.element = FORMATS[code][1]  # bytes
        self.swizzle = w[1] >> 13 & 3
        low = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
        strides = [(s | (w[3] >> (32 + 4 * i) & 15) << 32) * 16 for i, s in enumerate(low)]
        self.strides = [self.element, *strides][: self.rank]
        sizes = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
        self.sizes = [size + 1 for size in sizes][: self.rank]
        box = (w[6] >> 56, w[7] & 255, w[7] >> 8 & 255, w[7] >> 16 & 255, w[7] >> 24 & 255)
        self.box = [extent + 1 for extent in box][: self.rank]
        if w[1] >> 11 & 3 or any(w[6] >> (32 + 3 * i) & 7 for i in range(self.rank)):
            raise Unsupported("TMA with interleave or element strides")
        row = self.box[0] * self.element
        if row % 16:
            raise SimulationError(f"a TMA box row of {row} bytes: must be a multiple of 16")
        if self.swizzle and row > 16 << self.swizzle:
            raise SimulationError(f"a TMA box row of {row} bytes is wider than the swizzle")
        self.count = int(np.prod(self.box))
        self.bytes = self.count * self.element

    def __str__(self):
        return f"sizes {self.sizes} strides {self.strides} box {self.box} swizzle {(0, 32, 64, 128)[self.swizzle]}"

    def rows(self, coordinates):
        """Offsets in global memory of the rows of the box, and their bytes; what is outside of the tensor is left out."""
        (first, *others), (extent, *_) = coordinates, self.box
        low, high = max(first, 0), min(first + extent, self.sizes[0])
        offset = np.array([self.address - GMEM_BASE + low * self.element], S64)
        for at, extent, size, stride in zip(others, self.box[1:], self.sizes[1:], self.strides[1:]):
            x = np.arange(max(at, 0), min(at + extent, size))
            offset = (x[:, None] * stride + offset[None, :]).reshape(-1)
        return (offset, (high - low) * self.element) if high > low else (offset[:0], 0)

    def place(self, coordinates, smem_address):
        """For each element of the box: its byte offset in global memory, whether it is inside, its shared memory address."""
        offset, inside = np.zeros(1, S64), np.ones(1, bool)
        for at, extent, size, stride in zip(coordinates, self.box, self.sizes, self.strides):
            x = at + np.arange(extent)
            offset = (x[:, None] * stride + offset[None, :]).reshape(-1)
            inside = (((x >= 0) & (x < size))[:, None] & inside[None, :]).reshape(-1)
        return offset, inside, swizzle(smem_address + np.arange(self.count) * self.element, self.swizzle)


@functools.lru_cache(maxsize=4096)
def operand_offsets(start, leading, stride, swizzle_bits, wide_atoms, is_mn_major, rows, k, element):
    """Byte offset in shared memory of every element of a [rows, k] operand of a tensor core.

    The canonical layouts that wgmma and tcgen05 descriptors share: atoms of 8 rows times the width of the swizzle. K-major:
    atoms `stride` apart along rows (`leading` only without swizzle). MN-major: atoms `leading` apart along rows, `stride`
    along k (the other way round without swizzle). The swizzle uses the bits of absolute addresses.
    """
    width = 128 if wide_atoms else 16 << swizzle_bits
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    across, piece = width // element, 16 // element
    if wide_atoms:  # the 128-byte swizzle of 32-byte pieces: atoms of 4 k
        if not is_mn_major:
            raise SimulationError("the 128-byte swizzle of 32-byte pieces with a K-major operand")
        a = start + (r % across) * element + (r // across) * leading + (c % 4) * width + (c // 4) * stride
        return (a ^ ((a >> 2) & 0x60)) - SMEM_BASE
    if is_mn_major and swizzle_bits:
        a = start + (r % across) * element + (r // across) * leading + (c % 8) * width + (c // 8) * stride
    elif is_mn_major:
        a = start + (r % piece) * element + (r // piece) * stride + (c % 8) * 16 + (c // 8) * leading
    elif swizzle_bits:
        a = start + (r % 8) * width + (r // 8) * stride + c * element
    else:
        a = start + (r % 8) * 16 + (r // 8) * stride + (c % piece) * element + (c // piece) * leading
    return swizzle(a, swizzle_bits) - SMEM_BASE


def descriptor_fields(descriptor):
    """Start, leading and stride byte offsets, which both kinds of descriptor keep in the same bits."""
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
