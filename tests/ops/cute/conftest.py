# SPDX-License-Identifier: Apache-2.0
"""Blackwell's kernels of a family are compiled in one process, by whichever test first needs one of them, and so are those of
decode. What Hopper alone has kernels for is not run on other GPUs."""

import pytest
import torch

from tests.support.variants import BLACKWELL_DECODE, BLACKWELL_GDN, BLACKWELL_KDA, BLACKWELL_LIGHTNING
from tools.ptx import compile_together

compile_together("sm_100a", BLACKWELL_KDA)
compile_together("sm_100a", BLACKWELL_GDN)
compile_together("sm_100a", BLACKWELL_LIGHTNING)
compile_together("sm_100a", BLACKWELL_DECODE)

HOPPERS = ("test_gdn.py", "test_gdn_bwd.py", "test_kda_bwd.py")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0):
        return
    for item in items:
        if item.path.name in HOPPERS and item.path.parent.name == "cute" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="its kernels are Hopper's"))
