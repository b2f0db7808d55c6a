# SPDX-License-Identifier: Apache-2.0
"""cuLA: linear-attention kernels for PyTorch. Kimi Delta Attention, Gated DeltaNet, Lightning Attention, decode, one GPU or many.

Level 1 is here: `cula_kda`, `cula_gdn`, `cula_lightning`, `cula_decode` and `explain`. Level 0, the kernels by name: `cula.kda`,
`cula.gdn`, `cula.lightning`, `cula.utils`. Level 2, many GPUs: `cula.dist`. The definitions in float64: `cula.reference`.
"""

from cula import registry as registry
from cula.api import cula_decode, cula_gdn, cula_kda, cula_lightning, explain
from cula.version import __version__

__all__ = ["__version__", "cula_decode", "cula_gdn", "cula_kda", "cula_lightning", "explain"]
