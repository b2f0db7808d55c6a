# SPDX-License-Identifier: Apache-2.0
"""Level 2: tensor, context and hybrid parallelism over `torch.distributed`, composed from the kernels of level 1.

`cula_*_tp` share out heads, `cula_*_cp` tokens, `cula_*_tp_cp` both. Importing this needs no GPU and initialises
nothing. See docs/distributed.md for what every rank holds before and after each call.

| file | what is there |
|---|---|
| `tp.py`, `cp.py` | the calls, for any family; the public functions of a family are in its `parallel.py` |
| `plan.py` | from arguments to a call: local checks, where tokens lie, what ranks must agree on |
| `call.py` | a context-parallel call on one rank, forward and backward |
| `scan.py` | states across ranks: one scan over affine transitions for every family and both directions |
| `kernels.py` | the local passes it needs |
| `varlen.py` | which rank holds which tokens |
| `comm.py`, `handshake.py` | messages, and agreement before the first one |
| `cost.py` | the model behind `cp_mode="auto"` |
| `buffers.py` | state buffers of one rank |
"""

from cula.dist.buffers import alloc_decode_state_pool, alloc_state_buffer
from cula.dist.comm import tie
from cula.dist.cost import Schedule
from cula.dist.varlen import split_cu_seqlens_for_sp
from cula.gdn.parallel import cula_gdn_cp, cula_gdn_tp, cula_gdn_tp_cp
from cula.kda.parallel import cula_kda_cp, cula_kda_tp, cula_kda_tp_cp
from cula.lightning.parallel import cula_lightning_cp, cula_lightning_tp, cula_lightning_tp_cp

__all__ = [
    "Schedule",
    "alloc_decode_state_pool",
    "alloc_state_buffer",
    "cula_gdn_cp",
    "cula_gdn_tp",
    "cula_gdn_tp_cp",
    "cula_kda_cp",
    "cula_kda_tp",
    "cula_kda_tp_cp",
    "cula_lightning_cp",
    "cula_lightning_tp",
    "cula_lightning_tp_cp",
    "split_cu_seqlens_for_sp",
    "tie",
]
