# SPDX-License-Identifier: Apache-2.0
"""Blackwell's kernels of a family are compiled in one process, by whichever test first needs one of them."""

from tests.support.variants import BLACKWELL_KDA, BLACKWELL_LIGHTNING
from tools.ptx import compile_together

compile_together("sm_100a", BLACKWELL_KDA)
compile_together("sm_100a", BLACKWELL_LIGHTNING)
