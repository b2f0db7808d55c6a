# SPDX-License-Identifier: Apache-2.0
"""What a run of n tokens does to a Lightning state S [V, K]: `S -> M S + B`, where M = exp(-s n) is one number a head."""

import torch
from torch import Tensor

from cula.core.family import Transition
from cula.lightning.problem import LightningInputs, LightningProblem


def factor(problem: LightningProblem, x: LightningInputs) -> Tensor:
    """M of sequences of one length, [N, HV, 1, 1]."""
    return torch.exp(-x.decay * problem.T).view(1, -1, 1, 1).expand(problem.N, -1, 1, 1)


TRANSITION = Transition(is_dense=False, factor=factor)
