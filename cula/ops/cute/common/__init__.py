# SPDX-License-Identifier: Apache-2.0
"""Device code that the CuTe kernels of every architecture share. Its modules import cutlass; this file does not."""
