# SPDX-License-Identifier: Apache-2.0
"""Number formats, names of numpy types, and where the simulated memories are."""

import numpy as np

F32, F64 = np.float32, np.float64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
S16, S32, S64 = np.int16, np.int32, np.int64

LANES = np.arange(32)  # of a warp

# Addresses, far enough apart that one of a wrong memory is noticed.
SMEM_BASE, GMEM_BASE, PARAM_BASE = 0x400, 0x10000000, 0x40000000000
SMEM_BYTES = 227 * 1024  # of a block, at most
CLUSTER_BLOCKS = 16  # likewise
SMEM_WINDOW = 0x100000  # how far addresses of the shared memories of two neighbours in a cluster are apart


class SimulationError(RuntimeError):
    """The program did something the machine does not allow, or that needs a wait it lacks."""


class HostError(RuntimeError):
    """What the compiled function would raise in Python."""


class Unsupported(NotImplementedError):
    """The program uses something the simulator does not know."""


def bf16_to_f32(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x):
    """Rounded to nearest, ties to even."""
    return (round_to_bf16(x) >> U32(16)).astype(U16)


def round_to_bf16(x):
    """The same in the upper half of 32 bits; the lower one is anything."""
    x = np.ascontiguousarray(x, dtype=F32)
    bits = x.view(U32)
    rounded = bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))
    is_nan = x != x
    if is_nan.any():
        rounded[is_nan] = 0x7FC00000
    return rounded


def f16_to_f32(bits):
    """Exact."""
    return bits.view(np.float16).astype(F32)


def f32_to_f16(x):
    return np.asarray(x, F32).astype(np.float16).view(U16)


def widen(bits, form):
    """16-bit patterns to float32; form "bf16" or "f16"."""
    return bf16_to_f32(bits) if form == "bf16" else f16_to_f32(np.ascontiguousarray(bits))


def narrow(x, form):
    """float32 to 16-bit patterns, rounded to nearest, ties to even."""
    return f32_to_bf16(x) if form == "bf16" else f32_to_f16(x)


def to_tf32(bits):
    """What a tensor core sees of a 32-bit pattern: not the low 13 bits."""
    return (bits & U32(0xFFFFE000)).view(F32)


def halves(words, form="bf16"):
    """u32 [...] -> float32 [..., 2], the low half first."""
    if form != "bf16":
        return f16_to_f32(np.ascontiguousarray(words).view(U16)).reshape(*words.shape, 2)
    out = np.empty((*words.shape, 2), U32)
    np.left_shift(words, U32(16), out[..., 0])
    np.bitwise_and(words, U32(0xFFFF0000), out[..., 1])
    return out.view(F32)
