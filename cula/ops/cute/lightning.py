# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on the CuTe kernels: which kernel, how sequences are cut, and the launches.

`sm90/lightning.py` says what the kernels compute. Forward only: the gradient is another backend's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula.core.replay.record import Address, LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.core.replay.workspace import workspace
from cula.lightning.problem import LightningInputs, LightningProblem
from cula.ops.cute.launch import again as launch_again
from cula.ops.cute.tensors import TMA_BYTES, address, as_states, as_tokens, stream_of
from cula.ops.cute.toolchain.loader import load

ARCH = "sm_90a"
CHUNK = 64  # tokens that the kernels take at once


@dataclass(frozen=True)
class Cut:
    """A kernel and how its work is cut."""

    kernel: str  # d128, d128_half or d64
    segment: int  # tokens; 0: sequences are whole
    per_seq: int  # segments of every sequence, where all are of one length
    num_ids: int  # segments in all, or sequences
    num_blocks: int


# Microseconds on an H200, bf16, fitted to the times of various kernels and cuts of T = 2048 to 131072 with H = 4 to 96. Only
# their ratios matter, to weigh cuts and kernels against each other.
CHUNK_US = {"d128": 1.65, "d128_half": 1.02, "d64": 0.8}  # of a walk, where memory does not hold it up
ENDS_US = {"d128": 0.7, "d128_half": 0.4, "d64": 0.4}  # a chunk of the first pass
ITEM_US = 3.0  # first loads and last stores of an item
LAUNCH_US = {"d128": 14.0, "d128_half": 8.0, "d64": 8.0}  # the first pass's own beginning and end
SEED_US = {"d128": 1.2, "d128_half": 0.6, "d64": 0.3}  # reading the end of one earlier segment
BYTES_PER_US = 4.2e6
SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MIN_SEGMENT_CHUNKS = 4


def cut(problem: LightningProblem, num_sms: int) -> Cut:
    """The cheapest of the kernels and cuts, by the times above and sizes the host knows."""
    N, T = problem.N, problem.T
    # Packed lengths are not known here: as if all were alike.
    chunks = max(1, -(-(T // max(1, N) if problem.is_packed else T) // CHUNK))
    options = [
        (_cost(kernel, N, problem.HV, problem.K, chunks, per_seq, num_sms), kernel, per_seq)
        for kernel in (("d64",) if problem.V == 64 else ("d128", "d128_half"))
        for per_seq in SEGMENT_COUNTS
        if per_seq == 1 or chunks >= per_seq * MIN_SEGMENT_CHUNKS
    ]
    _, kernel, per_seq = min(options)
    return cut_into(problem, kernel, per_seq, num_sms)


def cut_into(problem: LightningProblem, kernel: str, per_seq: int, num_sms: int) -> Cut:
    """The cut with about `per_seq` segments to a sequence."""
    N, T = problem.N, problem.T
    blocks_of_v = 2 if kernel == "d128_half" else 1
    if problem.is_packed:
        # A length that cuts a sequence of the mean length so; a longer one is cut into more.
        segment = 0 if per_seq == 1 else -(-(T // N) // (per_seq * CHUNK)) * CHUNK
        num_ids, per_seq = (T // segment + N if segment else N), 1
    else:
        segment = 0 if per_seq == 1 else -(-T // (per_seq * CHUNK)) * CHUNK
        per_seq = -(-T // segment) if segment else 1
        num_ids = N * per_seq
    return Cut(kernel, segment, per_seq, num_ids, min(num_ids * problem.HV * blocks_of_v, num_sms))


def _cost(kernel: str, N: int, HV: int, K: int, chunks: int, per_seq: int, num_sms: int) -> float:
    heads = N * HV
    items = heads * per_seq * (2 if kernel == "d128_half" else 1)
    rounds, length = -(-items // num_sms), -(-chunks // per_seq)
    bytes_of_chunk = CHUNK * K * 2
    walk = max(rounds * (ITEM_US + length * CHUNK_US[kernel]), heads * chunks * 4 * bytes_of_chunk / BYTES_PER_US)
    if per_seq == 1:
        return walk
    share = (per_seq - 1) / per_seq
    ends = max(rounds * length * ENDS_US[kernel], heads * chunks * share * 2 * bytes_of_chunk / BYTES_PER_US)
    return walk + ends + LAUNCH_US[kernel] + (per_seq - 1) * SEED_US[kernel]


@functools.lru_cache(maxsize=1024)
def _cut_on(problem: LightningProblem, device: torch.device) -> Cut:
    return cut(problem, torch.cuda.get_device_properties(device).multi_processor_count)


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]` (written to `out` where given) and, where asked for, the final state `[N, HV, V, K]` float32."""
    ht = None
    if problem.output_final_state:
        ht = torch.empty((problem.N, problem.HV, problem.V, problem.K), dtype=torch.float32, device=x.q.device)
    return run(problem, x, _cut_on(problem, x.q.device), x.initial_state, ht, out=out), ht


def lightning_fwd_pool(
    problem: LightningProblem,
    x: LightningInputs,
    pool: Tensor,
    indices: Tensor,
    has_initial_state: Tensor | None,
    out: Tensor | None,
) -> Tensor | None:
    """Outputs; first states come from the slots and last states go there. None where the kernels do not take this pool."""
    if pool.stride(0) % 2 or pool.data_ptr() % (2 * pool.element_size()):
        return None
    write_to = indices.to(torch.int32).contiguous()
    read_from = write_to if has_initial_state is None else torch.where(has_initial_state, write_to, -1)
    return run(problem, x, _cut_on(problem, x.q.device), pool, pool, read_from, write_to, out)


def run(
    problem: LightningProblem,
    x: LightningInputs,
    cut: Cut,
    h0: Tensor | None,
    ht: Tensor | None,
    read_from: Tensor | None = None,
    write_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch with a given cut; returns o."""
    device = x.q.device
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device) if out is None else out
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    x = x._replace(q=as_tokens(x.q), k=as_tokens(x.k), v=as_tokens(x.v))
    h0 = h0 if h0 is None or write_to is not None else as_states(h0)  # a pool must do as it is
    seeds = None
    if cut.segment:
        seeds = torch.empty((cut.num_ids, problem.HV, problem.V, problem.K), dtype=torch.float32, device=device)
    addresses = [address(t) for t in (x.q, x.k, x.v, to, x.decay, h0, ht, seeds, x.cu_seqlens, read_from, write_to)]
    numbers = _numbers(problem, x, cut, to, h0, ht, write_to is not None)
    for kernel in _kernels(cut, h0 if h0 is not None else ht):
        kernel(*addresses, *numbers, stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def lightning_fwd_again(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A recipe for more calls like this one, with all that follows from shapes and strides worked out; None if some tensors would
    have to be copied. It takes those of x and then `out`, at addresses that TMA can read, and makes o and the final state."""
    p, device = problem, x.q.device
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device) if out is None else out
    ht = torch.empty((p.N, p.HV, p.V, p.K), dtype=torch.float32, device=device) if p.output_final_state else None
    if any(as_tokens(t) is not t for t in (*x[:3], o)):
        return None
    cut = _cut_on(p, device)
    of_q, of_k, of_v, of_decay = (*(Address(i, TMA_BYTES) for i in range(3)), Address(3))
    of_h0, of_cu = Address(4, TMA_BYTES), Address(5)
    of_o, of_ht, of_seeds, none = Address(~0, TMA_BYTES), Address(~1), Address(~2 if cut.segment else None), Address(None)
    of = (of_q, of_k, of_v, of_o, of_decay, of_h0, of_ht, of_seeds, of_cu, none, none)
    numbers = _numbers(p, x, cut, o, x.initial_state, ht, False)
    launches = tuple(launch_again(kernel, of, numbers) for kernel in _kernels(cut, ht))
    outputs = (form_of(o) if out is None else len(x), None if ht is None else form_of(ht))
    seeds = workspace(device.index, 4 * cut.num_ids * p.HV * p.V * p.K) if cut.segment else None
    return LaunchRecord(device.index, launches, outputs, seeds)


def _kernels(cut: Cut, states: Tensor | None) -> tuple[Callable[..., Any], ...]:
    """What a cut launches, for states of this dtype."""
    of = f"{cut.kernel}_{'bf16' if states is not None and states.dtype == torch.bfloat16 else 'fp32'}"
    walk = load(f"lightning_{of}", ARCH)
    return (load(f"lightning_ends_{of}", ARCH), walk) if cut.segment else (walk,)


def _numbers(
    p: LightningProblem, x: LightningInputs, cut: Cut, o: Tensor, h0: Tensor | None, ht: Tensor | None, is_indexed: bool
) -> tuple[int | float, ...]:
    """The arguments after the addresses, in the order of `sm90/lightning.py`."""
    return (
        *(stride for t in (x.q, x.k, x.v, o) for stride in t.stride()[1:3]),
        *(0 if t is None else t.stride(0) for t in (h0, ht)),
        p.B * p.T,
        p.H,
        p.HV,
        p.scale,
        p.N,
        0 if p.is_packed else p.T,
        cut.segment,
        cut.per_seq,
        cut.num_ids,
        p.HV // p.H,
        int(h0 is not None),
        int(ht is not None),
        int(is_indexed),
        cut.num_blocks,
    )
