# SPDX-License-Identifier: Apache-2.0
"""A family and a backend that live here only: what a new one has to bring, and all that it gets for it.

The family is a fading memory: `S <- exp(-r_t) S + v k^T;  o = scale S q`, with a rate r_t >= 0 a token and head. The backend
has one kernel module, for that family. Nothing outside of this folder knows of either.
"""
