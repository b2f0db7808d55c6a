# SPDX-License-Identifier: Apache-2.0
"""Level 0 of Lightning Attention: kernels by the names existing code imports."""

from cula.lightning.fla import chunk_lightning_attn, chunk_simple_gla, fused_recurrent_simple_gla
from cula.lightning.prefill import lightning_attn_fwd, lightning_attn_fwd_varlen
from cula.lightning.serving import linear_attention_decode

__all__ = [
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "fused_recurrent_simple_gla",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "linear_attention_decode",
]
