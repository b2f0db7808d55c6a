# SPDX-License-Identifier: Apache-2.0
"""Decode on Blackwell: the kernels of `common/decode_frame.py`, which no architecture owns.

They compile for it, and no call takes them yet: they have run on Hopper alone.
"""

from cula.ops.cute.common.decode_frame import decode_variants as variants

__all__ = ["variants"]
