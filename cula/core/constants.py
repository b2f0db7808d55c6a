# SPDX-License-Identifier: Apache-2.0
"""Numbers that formulas of several files share, each once."""

CHUNK = 64  # tokens in a chunk: `return_intermediate_states` and `checkpoint_every` count in these
LOG2_E = 1.4426950408889634
L2_NORM_EPS = 1e-6  # q and k are divided by sqrt(sum x^2 + eps)
SOFTPLUS_THRESHOLD = 20.0  # beyond it softplus(x) is x to float32's last bit
LOWER_BOUND_MIN = -5.0  # the least `lower_bound` of a gate, and what `safe_gate` promises
MAX_DECODE_TOKENS = 8  # tokens of a row in one decode call
