# SPDX-License-Identifier: Apache-2.0
"""The two ordered lists that the package is put together from. To add a family or a backend: its folder, and a line here."""

from cula.core.cp_context import register_cp_context
from cula.core.dispatch import register_backend
from cula.core.family import register_family
from cula.gdn.family import FAMILY as GDN
from cula.kda.family import FAMILY as KDA
from cula.lightning.family import FAMILY as LIGHTNING
from cula.ops.cute.backend import BACKENDS as CUTE
from cula.ops.torch.backend import BACKEND as TORCH
from cula.ops.triton.backend import BACKEND as TRITON

for family in (KDA, GDN, LIGHTNING):
    register_family(family)

for backend in (*CUTE, TRITON, TORCH):  # best first: the only ranking there is
    register_backend(backend)

register_cp_context("cula.dist.cp:from_cp_context")
