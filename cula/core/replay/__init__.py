# SPDX-License-Identifier: Apache-2.0
"""A call seen before: its launches are recorded, and made again with new addresses in a few microseconds.

| module               | what                                                                                                |
|----------------------|-----------------------------------------------------------------------------------------------------|
| `cache.py`           | records of a function's calls, found by the tensors and the static arguments of a call              |
| `record.py`          | `LaunchRecord`: outputs to allocate and launches to make; `guard`: are these tensors like those     |
| `native.c`           | both of these in C                                                                                  |
| `sizes.py`           | which sizes may differ between the calls of one record of a prefill                                 |
| `workspace.py`       | memory that the kernels of a call hand on to each other, kept for the next call                     |
| `torch_internals.py` | what a replay asks of torch, by the names that answer fastest                                       |
"""
