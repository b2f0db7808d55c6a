# SPDX-License-Identifier: Apache-2.0
"""Small CuTe kernels that try one mechanism each: what the loader and the PTX interpreter are tested with."""
