# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of a kernel, read off its machine code (SASS). The disassemblers are those that come with Triton.

| module           | what                                                                                           |
|------------------|------------------------------------------------------------------------------------------------|
| `counts.py`      | how many instructions of which kind kernels and their loops issue                              |
| `descriptors.py` | a fault of ptxas 12.8: descriptors of wgmma operands that are added to the wrong register      |
| `scoreboards.py` | which loads an instruction waits for                                                           |
"""
