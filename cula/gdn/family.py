# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet as a family: `S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = scale S q`, g one number a head."""

from cula.core.checks import IO_DTYPES
from cula.core.family import Decode, Family
from cula.gdn.problem import (
    DIFFERENTIABLE,
    GdnDecodeInputs,
    GdnInputs,
    GdnOptions,
    check_gdn,
    check_gdn_decode,
    check_gdn_decode_values,
    check_gdn_values,
)
from cula.gdn.transition import TRANSITION

FAMILY = Family(
    name="gdn",
    entry="cula.gdn.api:cula_gdn",
    Inputs=GdnInputs,
    Options=GdnOptions,
    check=check_gdn,
    check_values=check_gdn_values,
    differentiable=DIFFERENTIABLE,
    token_inputs=("q", "k", "v", "g", "beta"),
    value_head_dims={"v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1},
    transition=TRANSITION,
    state_dtypes=IO_DTYPES,
    decode=Decode(GdnDecodeInputs, check_gdn_decode, check_gdn_decode_values),
    bench="cula.gdn.bench",
    fuzz="cula.gdn.fuzz",
)
