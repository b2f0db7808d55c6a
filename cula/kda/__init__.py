# SPDX-License-Identifier: Apache-2.0
"""Level 0 of Kimi Delta Attention: by the names existing code imports."""

from cula.kda.fla import chunk_kda, fused_recurrent_kda
from cula.kda.prefill import kda_prefill_blackwell, kda_prefill_hopper
from cula.kda.serving import fused_sigmoid_gating_delta_rule_update, kda_decode, kda_packed_decode

__all__ = [
    "chunk_kda",
    "fused_recurrent_kda",
    "fused_sigmoid_gating_delta_rule_update",
    "kda_decode",
    "kda_packed_decode",
    "kda_prefill_blackwell",
    "kda_prefill_hopper",
]
