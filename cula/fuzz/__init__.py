# SPDX-License-Identifier: Apache-2.0
"""A fuzzer: calls of every family drawn at random, against the float64 definitions, with poisoned memory around every tensor.

    python -m cula.fuzz --seconds 60 --seed 1 [--backend triton] [--device cuda] [--family kda] [--jobs 8]

`draw.py` draws numbers and tensors, `family.py` says what a family adds, `prefill.py`, `decode.py` and `bad_input.py` make calls,
`judge.py` says what is wrong with one, `__main__.py` is the loop. A failure prints the line that makes the same call again.
"""
