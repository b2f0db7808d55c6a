# SPDX-License-Identifier: Apache-2.0
"""What the CuTe kernels of every architecture share. Its modules import cutlass, `decode_flags.py` and this file do not."""
