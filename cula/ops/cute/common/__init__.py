# SPDX-License-Identifier: Apache-2.0
"""What the CuTe kernels of every architecture share. Its modules import cutlass (but for `decode_flags.py`), this file does not."""
