# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: exact, differentiable, any device. The default on a CPU, and what the other backends are compared with."""
