# SPDX-License-Identifier: Apache-2.0
"""Kernels of a family are compiled in one process, by whichever test first needs one of them: the DSL takes longer to start than
a small kernel to compile. What Hopper alone has kernels for is not run on other GPUs."""

from pathlib import Path

import pytest
import torch

from tests.support import variants
from tools.ptx import compile_together

for arch, groups in {
    "sm_90a": (
        variants.HOPPER_KDA, variants.HOPPER_FUSED_KDA, variants.HOPPER_KDA_BWD, variants.HOPPER_GDN, variants.HOPPER_GDN_BWD,
        variants.HOPPER_LIGHTNING, variants.HOPPER_LIGHTNING_BWD, variants.HOPPER_DECODE, variants.DECODE_STEPS,
    ),
    "sm_100a": (
        variants.BLACKWELL_KDA, variants.MORE_BLACKWELL_KDA, variants.BLACKWELL_GDN, variants.BLACKWELL_LIGHTNING,
        variants.BLACKWELL_DECODE, variants.DECODE_STEPS,
    ),
}.items():  # fmt: skip
    for names in groups:
        compile_together(arch, names)

HERE = Path(__file__).parent
HOPPERS = ("test_gdn.py", "test_gdn_bwd.py", "test_kda_bwd.py", "test_kda_bwd_segments.py")


def pytest_collection_modifyitems(items):
    """A test that takes a `device` is interpreted where there is no GPU, and runs on one where there is: `pytest -m gpu` takes it
    there."""
    if not torch.cuda.is_available():
        return
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if "device" in getattr(item, "fixturenames", ()) and HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if is_hopper:
            continue
        if item.path.name in HOPPERS and item.path.parent.name == "cute" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="its kernels are Hopper's"))
