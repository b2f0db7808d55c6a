# SPDX-License-Identifier: Apache-2.0
"""Decode on Hopper: the kernels of `common/decode_frame.py`, which no architecture owns."""

from cula.ops.cute.common.decode_frame import decode_variants as variants

__all__ = ["variants"]
