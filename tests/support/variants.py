# SPDX-License-Identifier: Apache-2.0
"""Variants of CuTe kernels that more than one test file names."""

# The variants of Blackwell's KDA kernels that tests run: between them they have every type and flag.
BLACKWELL_KDA = tuple(f"kda_{kind}" for kind in (
    "f16_gate_bf16", "f16_log_f32", "bf16_gate_f32", "bf16_safe_bf16", "f16_softplus_bf16", "f16_gate_bf16_scalar",
))  # fmt: skip

# Of Blackwell's decode kernels one of each kind.
BLACKWELL_DECODE = ("decode_1_bf16", "decode_1_bf16_scalar", "decode_4_f32", "decode_4_bf16_tall", "decode_8_bf16_lightning")
BLACKWELL_LIGHTNING = tuple(f"lightning_{kind}" for kind in ("d128", "ends_d128", "d64", "ends_d64"))
BLACKWELL_GDN = ("gdn_f16_whole", "gdn_bf16_whole")
