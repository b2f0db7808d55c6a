# SPDX-License-Identifier: Apache-2.0
"""Compiling, keeping, loading and checking CuTe kernels; `docs/cute.md` follows one from source to launch."""
