# SPDX-License-Identifier: Apache-2.0
"""What the CuTe kernels of every architecture share. Its modules import cutlass, this file does not."""
