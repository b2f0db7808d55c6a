# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention as a family: `S <- exp(-s) S + v k^T;  o = scale S q`, with one decay s a head."""

from cula.core.family import Decode, Family
from cula.lightning.problem import (
    DIFFERENTIABLE,
    LightningDecodeInputs,
    LightningInputs,
    LightningOptions,
    check_lightning,
    check_lightning_decode,
    check_lightning_decode_values,
    check_lightning_values,
)
from cula.lightning.transition import TRANSITION

FAMILY = Family(
    name="lightning",
    entry="cula.lightning.api:cula_lightning",
    Inputs=LightningInputs,
    Options=LightningOptions,
    check=check_lightning,
    check_values=check_lightning_values,
    differentiable=DIFFERENTIABLE,
    token_inputs=("q", "k", "v"),
    value_head_dims={"v": 2, "decay": 0, "initial_state": 1},
    transition=TRANSITION,
    decode=Decode(LightningDecodeInputs, check_lightning_decode, check_lightning_decode_values),
    bench="cula.lightning.bench",
    fuzz="cula.lightning.fuzz",
)
