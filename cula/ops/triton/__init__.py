# SPDX-License-Identifier: Apache-2.0
"""Portable kernels in Triton, for every NVIDIA GPU from sm_80 on."""
