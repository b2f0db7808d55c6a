# SPDX-License-Identifier: Apache-2.0
"""Blackwell's KDA kernels are compiled in one process, by whichever test first needs one of them, and so are those of decode."""

from tests.support.variants import BLACKWELL_DECODE, BLACKWELL_KDA
from tools.ptx import compile_together

compile_together("sm_100a", BLACKWELL_KDA)
compile_together("sm_100a", BLACKWELL_DECODE)
