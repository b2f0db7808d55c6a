# SPDX-License-Identifier: Apache-2.0
"""The bandwidth floor: the bytes a case must move, each once, at the speed this machine copies.

For a KDA prefill of T tokens in bf16 (e = 2 bytes an element):

    T (2 H K e + HV (2 V e + K e + e)) + 2 N HV V K 4

that is q, k; v and o; g; beta; the states in and out. Training moves the forward's bytes, then the inputs again with do,
and writes a gradient for each input. Decode reads and writes a state for each row, and writes one for each draft
token where those are kept.
"""

from __future__ import annotations

import time

import torch

from cula.bench.cases import DTYPES, Case
from cula.bench.family import bench_of


def floor_bytes(case: Case) -> int:
    e, state_bytes = case.torch_dtype.itemsize, DTYPES[case.pool].itemsize
    tokens_in = 2 * case.H * case.K * e + case.HV * case.V * e
    tokens_in += bench_of(case.family).token_bytes(case) * (torch.float32.itemsize // e if case.has("f32") else 1)
    o = case.HV * case.V * e
    state = case.N * case.HV * case.V * case.K * state_bytes
    if case.is_decode:
        kept = state * case.lens[0] * case.has("keep")
        return case.T * (tokens_in + o) + 2 * state + kept
    forward = case.T * (tokens_in + o) + state * (2 if case.has("pool") else case.has("h0") + case.has("ht"))
    if not case.is_train:
        return forward
    return forward + case.T * (2 * tokens_in + o) + 2 * state * case.has("h0")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes here, best of a few: what the floor divides by."""
    on_gpu = device.type == "cuda"
    size = 2**30 if on_gpu else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(12 if on_gpu else 4):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            target.copy_(source)
            seconds = time.perf_counter() - began
        best = min(best, seconds)
    return 2 * size / best
