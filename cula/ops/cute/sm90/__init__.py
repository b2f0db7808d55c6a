# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper (sm_90a): wgmma, TMA. Its modules import cutlass; this file does not."""
