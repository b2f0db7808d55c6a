# SPDX-License-Identifier: Apache-2.0
"""Hopper. Free of cutlass."""

from __future__ import annotations

from cula.ops.cute.arch import Arch, KdaTraits

HOPPER = Arch(
    name="sm90",
    title="Hopper",
    targets={(9, 0): "sm_90a"},
    modules={
        "kda": ("sm90.kda", "sm90.kda_fused", "sm90.kda_bwd"),
        "lightning": ("sm90.lightning", "sm90.lightning_bwd"),
        "gdn": ("sm90.gdn", "sm90.gdn_bwd"),
        "decode": ("sm90.decode",),
    },
    serves=(
        *("kda", "kda_bwd", "kda_transition", "kda_state_grad"),
        *("gdn", "gdn_bwd", "gdn_transition", "gdn_state_grad"),
        *("lightning", "lightning_bwd", "decode"),
    ),
    summary="hand-tuned kernels for Hopper, CuTe DSL",
    num_sms=(78, 114, 132),  # H20; H100 PCIe; H100 SXM, H200
    new=(),  # all have run on an H200
    kda=KdaTraits(
        has_fused=True,
        has_chained_schedule=True,
        shortest_segment=0.25,
        has_whole_squares=False,
        intra_blocks=3,
    ),
)
