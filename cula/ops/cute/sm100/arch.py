# SPDX-License-Identifier: Apache-2.0
"""Blackwell, data-centre parts. Free of cutlass."""

from __future__ import annotations

from cula.ops.cute.arch import ALL, Arch, KdaTraits

BLACKWELL = Arch(
    name="sm100",
    title="Blackwell",
    targets={(10, 0): "sm_100a", (10, 3): "sm_103a"},
    modules={
        "kda": ("sm100.kda",),
        "gdn": ("sm100.gdn",),
        "lightning": ("sm100.lightning",),
        "decode": ("sm100.decode",),
    },
    serves=("kda", "gdn", "lightning", "decode"),
    summary="hand-tuned kernels for Blackwell, CuTe DSL; never run on hardware: check themselves at first use",
    num_sms=(148,),  # B200
    new=ALL,  # to shorten it: `python tools/hardware_run.py` on one, and its figures in docs/*-blackwell.md
    kda=KdaTraits(
        has_fused=False,
        has_chained_schedule=False,
        shortest_segment=0.6,
        has_whole_squares=True,
        intra_blocks=2,
    ),
)
