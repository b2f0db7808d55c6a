# SPDX-License-Identifier: Apache-2.0
"""What generated code calls: arithmetic that is not one numpy call, memory accesses, and what the lanes of a warp do together.

Each takes whole rows of registers (all lanes of a run of warps at once) and writes its result into one. `v` is the Views of
those warps, `m` the mask of lanes that are active (None: all of them), `place` where in the program an access is.
"""

import numpy as np

from tools.ptx.values import (
    F32,
    F64,
    LANES,
    S32,
    S64,
    SMEM_BASE,
    U16,
    U32,
    U64,
    SimulationError,
    f32_to_bf16,
    halves,
    narrow,
    round_to_bf16,
    to_tf32,
    widen,
)

# Arithmetic.


def fma(x, y, z, out):
    """The product is exact in float64; the sum is rounded there, and then to float32."""
    np.copyto(out, np.multiply(x, y, dtype=F64) + z, casting="same_kind")


def rsqrt(x, out):
    np.divide(F32(1), np.sqrt(x), out)


def divide(x, y, out):
    """Integers; towards zero."""
    if x.dtype.kind == "u":
        np.floor_divide(x, y, out)
    else:
        out[...] = np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def multiply_high(x, y, out):
    """The upper half of a product of 32-bit integers."""
    wide = S64 if out.dtype.kind == "i" else U64
    out[...] = (np.multiply(x, y, dtype=wide) >> wide(32)).astype(out.dtype)


def shift(x, n, out, is_left):
    """By a register: by as many bits as there are or more nothing is left but, to the right, the sign."""
    bits = out.dtype.itemsize * 8
    by = np.minimum(n, U32(bits - 1)).astype(out.dtype)
    r = np.left_shift(x, by) if is_left else np.right_shift(x, by)
    out[...] = r if out.dtype.kind == "i" and not is_left else np.where(n >= bits, out.dtype.type(0), r)


def funnel_shift(low, high, n, out, is_left):
    """The upper word of (high:low) << n, or the lower one of (high:low) >> n; n taken modulo 32."""
    pair = np.left_shift(high, U64(32), dtype=U64) | np.asarray(low, U64)
    by = np.asarray(n, U64) & U64(31)
    out[...] = ((pair << by) >> U64(32) if is_left else pair >> by).astype(U32)


def lop3(a, b, c, out, table):
    """Any function of three bits, bitwise: bit 4a + 2b + c of the table."""
    result = U32(0)
    for i in range(8):
        if table >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    out[...] = result


def permute_bytes(a, b, selector, out):
    """prmt: each of four selectors takes a byte of (b:a); its top bit spreads that byte's sign."""
    pair = np.asarray(a, U64) | (np.asarray(b, U64) << U64(32))
    selector, result = np.asarray(selector, U64), U64(0)
    for i in range(4):
        pick = selector >> U64(4 * i) & U64(15)
        byte = pair >> (U64(8) * (pick & U64(7))) & U64(255)
        byte = np.where(pick & U64(8), np.where(byte & U64(128), U64(255), U64(0)), byte)
        result = result | byte << U64(8 * i)
    out[...] = result.astype(U32)


def population(x, out):
    """popc"""
    out[...] = np.bitwise_count(x)


def packed(operation, form, out, *operands):
    """Arithmetic on two 16-bit numbers a register, rounded once."""
    x = [halves(np.broadcast_to(operand, out.shape), form).astype(F64) for operand in operands]
    y = {
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "mul": lambda: x[0] * x[1],
        "fma": lambda: x[0] * x[1] + x[2],
        "max": lambda: np.fmax(x[0], x[1]),
        "min": lambda: np.fmin(x[0], x[1]),
        "neg": lambda: -x[0],
        "abs": lambda: np.abs(x[0]),
        "ex2": lambda: np.exp2(x[0]),
    }[operation]()
    bits = narrow(y.astype(F32), form).astype(U32)
    out[...] = bits[..., 0] | bits[..., 1] << U32(16)


def pack(high, low, out, form):
    """Two float32 to two 16-bit numbers in one register."""
    if form == "bf16":
        np.bitwise_or(round_to_bf16(low) >> U32(16), round_to_bf16(high) & U32(0xFFFF0000), out)
    else:
        np.copyto(out, narrow(low, form).astype(U32) | (narrow(high, form).astype(U32) << U32(16)))


def round_tf32(x, out):
    """To nearest, ties away from zero: cvt.rna.tf32.f32."""
    np.copyto(out, (x + U32(0x1000)) & U32(0xFFFFE000))


def to_integer(x, out, rounding):
    """A float to an integer register, saturated; NaN becomes 0."""
    r = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rounding](x.astype(F64))
    limits = np.iinfo(out.dtype)
    out[...] = np.clip(np.nan_to_num(r, nan=0.0), limits.min, limits.max).astype(S64).astype(out.dtype)


# Memory.


def behind(base, offset):
    """Addresses some bytes behind those in registers. In registers of 32 bits sums wrap: a base may be below zero."""
    a = base.astype(S64) + offset
    return a & 0xFFFFFFFF if base.dtype.itemsize == 4 else a


def addresses(v, m, base, offset):
    """The addresses of the active lanes."""
    a = behind(base, offset)
    a = a if a.ndim else np.full(v.threads, a)
    return a if m is None else a[m]


def full(v, m, value):
    """The values of the active lanes, of a row or a constant."""
    value = value if value.ndim else np.full(v.threads, value)
    return value if m is None else value[m]


def load(v, m, place, space, address, offset, width, rows, is_signed=False):
    """Into registers that may be wider."""
    words, at = v.block.locate(space, addresses(v, m, address, offset), width, len(rows))
    if v.block.races is not None:
        v.block.races.access(v, m, place, words, at, len(rows))
    words = words.view(words.dtype.str.replace("u", "i")) if is_signed else words
    for j, row in enumerate(rows):
        if row is None:
            continue
        if m is None:
            row[...] = words[at + j if j else at]
        else:
            row[m] = words[at + j]


def store(v, m, place, space, address, offset, width, values):
    """Of registers or constants, the lower bits if they are wider."""
    words, at = v.block.locate(space, addresses(v, m, address, offset), width, len(values))
    if v.block.races is not None:
        v.block.races.access(v, m, place, words, at, len(values))
    for j, value in enumerate(values):
        words[at + j if j else at] = full(v, m, value)


def reduce(v, m, place, space, address, offset, operation, value):
    """red: a reduction in memory whose old value nobody reads. `value` has the dtype the memory is seen as."""
    value = full(v, m, value)
    words, at = v.block.locate(space, addresses(v, m, address, offset), value.dtype.itemsize, 1)
    if v.block.races is not None:
        v.block.races.access(v, m, place, words, at, 1)
    {"add": np.add, "min": np.minimum, "max": np.maximum}[operation].at(words.view(value.dtype), at, value)


def fence(v, m, spaces):
    """fence.proxy.async for some state spaces."""
    if v.block.races is not None:
        v.block.races.proxies.fence(v, m, spaces)


def meet(v, m):
    """bar.warp.sync of whole warps."""
    if v.block.races is not None:
        v.block.races.proxies.meet_warps(v, m)


# Lanes of a warp.


def elect(v, m, row, predicate):
    """elect.sync: the first active lane of each warp."""
    active = np.ones((v.threads // 32, 32), bool) if m is None else m.reshape(-1, 32)
    leader = active.argmax(1)
    if row is not None:
        row[...] = np.repeat(leader, 32)
    predicate[...] = ((LANES[None, :] == leader[:, None]) & active).reshape(-1)


def shuffle(v, m, mode, x, operand, out, predicate, clamp):
    """shfl.sync. `clamp` packs the segment: its mask of lane bits in bits 8 to 12, the last or first lane in bits 0 to 4."""
    b = np.broadcast_to(operand, v.threads).reshape(-1, 32).astype(S64)
    mask, bound = int(clamp) >> 8 & 31, int(clamp) & 31
    first, last = LANES & mask, (LANES & mask) | (bound & ~mask)
    if mode == "up":
        source = LANES - b
        inside = source >= last
    else:
        source = {"bfly": lambda: LANES ^ b, "idx": lambda: first | (b & ~mask), "down": lambda: LANES + b}[mode]()
        inside = source <= last
    source = np.where(inside, source, LANES)
    if predicate is not None:
        predicate[...] = np.broadcast_to(inside, source.shape).reshape(-1)
    out[...] = np.take_along_axis(np.broadcast_to(x, v.threads).reshape(-1, 32), source, 1).reshape(-1)


def vote(v, m, mode, x, out):
    """vote.sync"""
    x = np.broadcast_to(x, v.threads).reshape(-1, 32)
    if mode == "ballot":
        bits = (x.astype(U64) << LANES.astype(U64)).sum(1).astype(U32)
        out[...] = np.repeat(bits, 32)
    elif mode == "uni":
        out[...] = np.repeat(x.all(1) | ~x.any(1), 32)
    else:
        out[...] = np.repeat(x.all(1) if mode == "all" else x.any(1), 32)


def reduce_warp(v, m, mode, x, out):
    """redux.sync"""
    x = np.broadcast_to(x, v.threads).reshape(-1, 32)
    f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    out[...] = np.repeat(f[mode].reduce(x, axis=1).astype(out.dtype), 32)


def matrix_rows(v, m, place, address, offset, count):
    """Of each matrix the eight 16-byte rows, of each warp: lanes 8 j to 8 j + 7 hold the addresses of matrix j."""
    r = address.astype(S64).reshape(-1, 32)[:, : 8 * count] + (offset - SMEM_BASE)
    if (r & 15).any() or r.min() < 0 or r.max() + 16 > v.block.smem_bytes:
        raise SimulationError("an address of ldmatrix or stmatrix is misaligned or outside shared memory")
    rows = (r >> 4).reshape(-1, count, 8).transpose(1, 0, 2)
    if v.block.races is not None:
        for j, of_matrix in enumerate(rows):
            v.block.races.access_rows(v, m, place, of_matrix, j)
    return rows


def ldmatrix(v, m, place, address, offset, is_transposed, rows):
    """Lane t gets the pair of elements 2 (t % 4) and the next of row t // 4: pairs lie in the order of lanes."""
    for at, row in zip(matrix_rows(v, m, place, address, offset, len(rows)), rows):
        matrix = v.block.smem_rows[at]
        if is_transposed:
            matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1))
        row[...] = matrix.view(U32).reshape(-1)


def stmatrix(v, m, place, address, offset, is_transposed, values):
    for at, value in zip(matrix_rows(v, m, place, address, offset, len(values)), values):
        matrix = np.ascontiguousarray(value).view(U16).reshape(-1, 8, 8)
        v.block.smem_rows[at] = matrix.transpose(0, 2, 1) if is_transposed else matrix


# mma.sync fragments, [register, lane(, half)]: rows and columns of A [16, k], B [k, 8], C [16, 8]. A lane has pairs of 16-bit
# elements of a row of A and C, and of a column of B.
_ROW, _COLUMN = LANES // 4, 2 * (LANES % 4)
_I4, _I2 = np.arange(4)[:, None], np.arange(2)[:, None]
A16_ROW = (_ROW + 8 * (_I4 % 2))[..., None]
A16_K = (_COLUMN + 8 * (_I4 // 2))[..., None] + np.arange(2)
B16_K, B16_COLUMN = (_COLUMN + 8 * _I2)[..., None] + np.arange(2), _ROW[None, :, None]
A32_ROW, A32_K = _ROW + 8 * (_I4 % 2), LANES % 4 + 4 * (_I4 // 2)
B32_K, B32_COLUMN = LANES % 4 + 4 * _I2, _ROW[None, :]
C_ROW, C_COLUMN = _ROW + 8 * (_I4 // 2), _COLUMN + _I4 % 2
OF_C = (8 * C_ROW + C_COLUMN).ravel()  # where the elements of registers are in C


def _in_registers(row, column, columns):
    """The other way round: where the elements of a matrix are among those of registers, element by element."""
    return np.argsort((row * columns + column).ravel())


# (of A, of B), by type and number of registers of A
FRAGMENTS = {
    ("tf32", 4): (_in_registers(A32_ROW, A32_K, 8), _in_registers(B32_K, B32_COLUMN, 8)),
    ("16", 4): (_in_registers(A16_ROW, A16_K, 16), _in_registers(B16_K, B16_COLUMN, 8)),
    ("16", 2): (_in_registers(A16_ROW[:2], A16_K[:2], 8), _in_registers(B16_K[:1], B16_COLUMN[:1], 8)),
}


def mma(v, m, form, k, d, a, b, c):
    """mma.sync.m16n8k{8,16}: fp32 sums; registers by number."""
    words, lanes, warps = v.block.registers["U"], slice(v.start, v.stop), v.threads // 32
    take = lambda rows: words[rows, lanes].reshape(len(rows), warps, 32).transpose(1, 0, 2)
    values = to_tf32 if form == "tf32" else lambda x: halves(x, form)
    of_a, of_b = FRAGMENTS["tf32" if form == "tf32" else "16", len(a)]
    A = values(take(a)).reshape(warps, -1)[:, of_a].reshape(warps, 16, k)
    B = values(take(b)).reshape(warps, -1)[:, of_b].reshape(warps, k, 8)
    D = A.astype(F64) @ B.astype(F64)
    out = D.reshape(warps, 128)[:, OF_C].reshape(warps, 4, 32) + np.ascontiguousarray(take(c)).view(F32)
    words[d, lanes] = out.astype(F32).view(U32).transpose(1, 0, 2).reshape(4, v.threads)


ENVIRONMENT = {
    "np": np, "copy": np.copyto, "add": np.add, "sub": np.subtract, "mul": np.multiply, "U16": U16, "S32": S32, "U32": U32,
    "S64": S64, "U64": U64, "F32": F32, "widen": widen, "f32_to_bf16": f32_to_bf16, "narrow": narrow,
    **{f.__name__: f for f in (fma, rsqrt, divide, multiply_high, shift, funnel_shift, lop3, permute_bytes, population, packed,
                               pack, round_tf32, to_integer, load, store, reduce, fence, meet, elect, shuffle, vote,
                               reduce_warp, ldmatrix, stmatrix, mma)},
}  # fmt: skip
