# SPDX-License-Identifier: Apache-2.0
"""Level 0 of Gated DeltaNet: by the names existing code imports."""

from cula.gdn.fla import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from cula.gdn.prefill import gdn_prefill_blackwell, gdn_prefill_hopper
from cula.gdn.serving import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
    gdn_packed_decode,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gdn",
    "fused_sigmoid_gating_delta_rule_update",
    "gdn_packed_decode",
    "gdn_prefill_blackwell",
    "gdn_prefill_hopper",
]
