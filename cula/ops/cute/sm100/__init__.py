# SPDX-License-Identifier: Apache-2.0
"""Kernels for Blackwell (sm_100a, sm_103a): tcgen05, tensor memory, TMA. Its modules import cutlass; this file does not."""
