# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention as a family: `S <- S diag(exp g);  S <- S + beta (v - S k) k^T;  o = scale S q`."""

from cula.core.family import Decode, Family
from cula.kda.problem import (
    DIFFERENTIABLE,
    KdaDecodeInputs,
    KdaInputs,
    KdaOptions,
    check_kda,
    check_kda_decode,
    check_kda_decode_values,
    check_kda_values,
)
from cula.kda.transition import TRANSITION

FAMILY = Family(
    name="kda",
    entry="cula.kda.api:cula_kda",
    Inputs=KdaInputs,
    Options=KdaOptions,
    check=check_kda,
    check_values=check_kda_values,
    differentiable=DIFFERENTIABLE,
    token_inputs=("q", "k", "v", "g", "beta"),
    value_head_dims={"v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1},
    transition=TRANSITION,
    decode=Decode(KdaDecodeInputs, check_kda_decode, check_kda_decode_values),
    bench="cula.kda.bench",
    fuzz="cula.kda.fuzz",
)
