# SPDX-License-Identifier: Apache-2.0
"""What the host side of decode and its kernels agree on. No cutlass here: the host side runs without it."""

TOKENS = (2, 4, 8)  # that kernels are compiled for, beside one; a call of another number takes the next
TALL_TOKENS = (2, 4)  # on bfloat16 states of KDA, for warps with 32 rows too

# Bits of `flags`.
USE_NORM, IS_SOFTPLUS, IS_BOUNDED, G_IS_F32, BETA_IS_F32, INDEX_IS_I64, ZERO_IS_NULL, COMMIT, IS_SCALAR, ASK_EARLY = (
    1 << i for i in range(10)
)
