# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in plain PyTorch: KDA's functions, which take one gate a head."""

from cula.gdn.problem import by_kda
from cula.ops.torch import kda
from cula.ops.torch.kda import kda_decode as gdn_decode

__all__ = ["gdn_bwd", "gdn_decode", "gdn_fwd", "gdn_state_grad", "gdn_transition"]

gdn_fwd = by_kda(kda.kda_fwd)
gdn_bwd = by_kda(kda.kda_bwd)
gdn_transition = by_kda(kda.kda_transition)
gdn_state_grad = by_kda(kda.kda_state_grad)
