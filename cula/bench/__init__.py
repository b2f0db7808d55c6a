# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.bench`: cuLA beside its peers and beside the bytes that must move, on this machine.

| file | what is there |
|---|---|
| `cli.py` | the commands `run`, `report`, `compare` |
| `cases.py`, `suites.py` | what is measured: shapes, gates, flags |
| `inputs.py` | the tensors of a case |
| `peers.py`, `ours.py`, `distributed.py` | what runs: one adapter a library, cuLA among them |
| `timing.py`, `floor.py`, `check.py` | how it is judged: time, bytes, error against float64 |
| `runner.py`, `warm.py`, `results.py`, `progress.py` | a run, compiling before it, its JSON, what it prints |
| `report.py`, `plots.py`, `summary.py`, `passes.py`, `compare.py` | pages, pictures and verdicts, from result files alone |
"""
