# SPDX-License-Identifier: Apache-2.0
"""Layers: `KimiDeltaAttention`, `GatedDeltaNet`, `LightningAttention`, as `nn.Module`s that need torch alone.

The first two have the parameters of flash-linear-attention's layers by their names and shapes, so that its checkpoints load. Each
takes `[B, T, hidden]` and returns the same; a cache from `new_cache` continues sequences, `cu_seqlens` packs them. Heads may be
shared out over a group of processes (`tp_group`), tokens over another (`cp_group`).
"""

from cula.layers.gated_deltanet import GatedDeltaNet
from cula.layers.kda import KimiDeltaAttention
from cula.layers.lightning import LightningAttention
from cula.layers.parts import LayerCache, RMSNormGated, ShortConvolution

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "LayerCache", "LightningAttention", "RMSNormGated", "ShortConvolution"]
