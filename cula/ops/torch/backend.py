# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: serves every call on any device, and is what the others are measured against."""

from cula.core.dispatch import Backend

BACKEND = Backend("torch", "cula.ops.torch", "plain PyTorch, any device")
