# SPDX-License-Identifier: Apache-2.0
"""The fused kernels of KDA's prefill are tried with the calls of the split ones: see `kda_self_check.py`."""

from __future__ import annotations

from cula.ops.cute.kda_self_check import worst_error

__all__ = ["worst_error"]
