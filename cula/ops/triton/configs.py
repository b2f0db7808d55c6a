# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Triton kernels, by head dims, dtype and architecture, and the choice of segments.

Nothing is tuned at run time: one configuration a (dtype, K, V, architecture, kind of gate) means one compilation. A new length
costs nothing, but for the kernels of segments, which are compiled when few heads and many chunks first ask for them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cula.core.constants import CHUNK
from cula.kda.problem import KdaProblem


@dataclass(frozen=True)
class Tile:
    """One kernel's launch: block sizes along K and V (what the kernel calls BK and BV), warps, pipeline stages."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int
    max_regs: int | None = None  # cap on registers a thread, where one more block on a multiprocessor pays for some spills

    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_regs}


@dataclass(frozen=True)
class KdaConfig:
    """The tile of each kernel."""

    intra: Tile
    recurrence_fwd: Tile
    recurrence_bwd: Tile
    scan: Tile
    scores_bwd: Tile
    states_bwd: Tile
    pairs_bwd: Tile
    finish_bwd: Tile
    shares_bwd: Tile


def padded(size: int) -> int:
    """A head dim as blocks have it, which are powers of two: the channels past the head dim are masked (`tiles.py`)."""
    return max(32, 1 << (size - 1).bit_length())


@functools.cache
def kda_config(dtype: torch.dtype, K: int, V: int, sm: tuple[int, int] | None, is_safe: bool) -> KdaConfig:
    """Comments say what was tried on an H200 with bf16, K = V = 128, B = 1, T = 8192, H = 32;
    times: `docs/kda-triton.md`."""
    # Rows of 16-bit numbers that are no multiples of 16 bytes are fetched early into registers, of which sm_80 then has too few.
    is_aligned = K % 8 == 0 and V % 8 == 0
    K, V = padded(K), padded(V)
    wide = dtype == torch.float32  # operands take twice the room, and tf32x3 keeps two halves of each
    BV = min(64, V, K)
    # Two stages of 16-bit operands at K = 128 are 100 to 180 KB: Hopper and data-centre Blackwell hold them, others do not.
    big_smem = sm is None or sm[0] in (9, 10)
    stages = 2 if big_smem and not wide and K <= 128 else 1
    BV_bwd = BV
    if K > 128:  # 64 rows outgrow the tensor memory of sm_100 backward, and the registers of sm_80; 32 the 99 KB of sm_120
        BV, BV_bwd = (BV, min(32, V)) if big_smem else (min(32, V), min(16, V))
    if wide:
        BV = BV_bwd = min(16 if K > 128 else 32, V)
    intra = Tile(BK=min(64, K), BV=0, num_warps=4, num_stages=1)  # slower: 32 channels, eight warps
    if wide:  # three products for one: small tiles against spills
        intra = Tile(16, 0, num_warps=4, num_stages=1)
    if sm and sm[0] == 10 and (wide or not is_safe):  # sums over K that do not fit tensor memory beside each other: one pass
        intra = Tile(K, 0, num_warps=8, num_stages=1)
    return KdaConfig(
        intra=intra,
        # slower: 8 warps, 3 stages
        recurrence_fwd=Tile(BK=K, BV=BV, num_warps=8 if K > 128 or wide else 4, num_stages=stages),
        # slower: 8 warps, one stage
        recurrence_bwd=Tile(BK=K, BV=BV_bwd, num_warps=8 if K > 128 or wide else 4, num_stages=stages),
        scan=Tile(BK=32, BV=min(32, V), num_warps=4, num_stages=1),
        scores_bwd=Tile(BK=0, BV=min(32 if wide else 128, V), num_warps=4, num_stages=1),  # slower: 64, two stages
        # slower: one stage
        states_bwd=Tile(
            BK=min(32 if wide else 64, K), BV=min(32 if wide else 64, V), num_warps=4, num_stages=2 if is_aligned else 1
        ),
        # slower: 168 registers, which lets three blocks reside; 32 channels with two warps and mma.sync
        pairs_bwd=Tile(BK=min(32 if wide else 64, K), BV=0, num_warps=4, num_stages=1),
        finish_bwd=Tile(BK=K, BV=0, num_warps=4, num_stages=1),
        shares_bwd=Tile(BK=K, BV=0, num_warps=8, num_stages=1),
    )


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def kda_segment_chunks(problem: KdaProblem, num_sms: int, BV: int) -> int:
    """Chunks in a segment, 0 for whole sequences. Only sizes the host knows enter: T, N, HV, V and the card."""
    chains = max(1, problem.N * problem.HV * -(-problem.V // BV))
    tokens = problem.T if not problem.is_packed else problem.T // max(1, problem.N)  # a sequence's, on average
    chunks = -(-tokens // CHUNK)
    # Transitions cost two more passes over the chunks (B and M), so half a card of chains is better left whole.
    if 2 * chains > num_sms or chunks < 24:
        return 0
    # One chain a multiprocessor: more of them cost more in transitions than they hide in latency.
    segments = min(num_sms // chains, chunks // 8)
    return -(-chunks // segments)
