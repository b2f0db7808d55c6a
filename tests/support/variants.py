# SPDX-License-Identifier: Apache-2.0
"""Variants of CuTe kernels that more than one test file names.

Compiling one takes seconds, so the quick tests share a few. A case that takes another of the large kernels is slow.
"""

# Of KDA's forward on Hopper: between them every kind of gate, one a head or a channel, and both kinds of operands.
HOPPER_KDA = tuple(f"kda_{kind}" for kind in (
    "f16_gate_bf16", "f16_log_f32", "f16_softplus_bf16", "f16_gate_bf16_scalar", "bf16_gate_bf16",
))  # fmt: skip
HOPPER_FUSED_KDA = tuple(f"fused_kda_{kind}" for kind in ("f16_gate_bf16", "f16_log_bf16", "f16_gate_bf16_scalar"))
# Of its backward, which is the largest: gates of channels, and one a head.
HOPPER_KDA_BWD = ("bwd_kda_f16_gate_bf16", "bwd_kda_f16_log_f32_scalar")
HOPPER_GDN = ("gdn_norm_whole", "gdn_plain_whole", "gdn_norm_half", "gdn_plain_half")
HOPPER_GDN_BWD = ("bwd_gdn_log_bf16", "bwd_gdn_softplus_f32")
HOPPER_LIGHTNING = tuple(f"lightning_{ends}{shape}" for ends in ("", "ends_") for shape in ("d128", "d128_half", "d64"))
HOPPER_LIGHTNING_BWD = ("bwd_lightning_d64", "bwd_lightning_ends_d64", "bwd_lightning_d128")

# All of decode on Hopper.
HOPPER_DECODE = tuple(f"decode_{kind}" for kind in (
    *(f"1_{states}{kind}" for states in ("bf16", "f32") for kind in ("", "_scalar", "_lightning")),
    "2_bf16", "2_bf16_tall", "4_bf16", "4_bf16_tall", "8_bf16", "8_bf16_lightning",
    *(f"{tokens}_f32{shape}" for tokens in (2, 4, 8) for shape in ("", "_lightning", "_wide", "_wide_lightning")),
))  # fmt: skip
DECODE_STEPS = tuple(f"decode_steps_{states}{kind}" for states in ("f32", "bf16") for kind in ("", "_scalar", "_lightning"))

# Of KDA's on Blackwell those that the quick tests run; with the others every type and flag.
BLACKWELL_KDA = ("kda_f16_gate_bf16", "kda_bf16_gate_f32")
MORE_BLACKWELL_KDA = ("kda_f16_log_f32", "kda_bf16_safe_bf16", "kda_f16_softplus_bf16", "kda_f16_gate_bf16_scalar")

# Of Blackwell's decode kernels one of each kind.
BLACKWELL_DECODE = ("decode_1_f32", "decode_1_bf16_scalar", "decode_4_f32", "decode_4_bf16_tall", "decode_8_bf16_lightning")
BLACKWELL_LIGHTNING = tuple(f"lightning_{kind}" for kind in ("d128", "ends_d128", "d64", "ends_d64"))
BLACKWELL_GDN = ("gdn_norm_whole", "gdn_plain_whole")
