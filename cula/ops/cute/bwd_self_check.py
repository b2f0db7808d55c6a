# SPDX-License-Identifier: Apache-2.0
"""The calls that a backward without a recorded run on hardware is tried with: see `toolchain/self_check.py`.

Gradients of every input, from those of outputs and last states, over whole sequences and segments; for KDA's kernels also what
they make for context parallelism. The sequences are like those of the forward's check; on a GPU there are longer ones besides,
which have more chunks than there are blocks at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cula.core.problem import Problem
from cula.gdn.problem import GdnInputs, GdnOptions, check_gdn
from cula.ops.cute import gdn_bwd, kda_bwd, kda_self_check, lightning_bwd, lightning_self_check
from cula.ops.cute.kda_bwd_schedule import split_into
from cula.ops.cute.kda_self_check import Call, Flags
from cula.ops.cute.lightning_schedule import BACKWARD, make_schedule
from cula.ops.cute.lightning_self_check import Call as LightningCall
from cula.ops.cute.toolchain.self_check import relative_difference

Grads = Mapping[str, Tensor | None]

CALLS = (
    Call((70, 0, 5, 100), is_packed=True, H=1, HV=2, per_segment=100, is_slow=False, has_state=True),
    Call((100, 100), is_packed=False, H=2, HV=2, per_segment=1, is_slow=True, has_state=False),
    Call((330, 33), is_packed=True, H=1, HV=2, per_segment=1, is_slow=True, has_state=True, beta=torch.bfloat16),
)
LONG = (
    Call((1500, 0, 1, 700, 2300), is_packed=True, H=4, HV=8, per_segment=8, is_slow=False, has_state=True),
    Call((2100, 2100), is_packed=False, H=8, HV=8, per_segment=16, is_slow=True, has_state=True),
)
OF_LIGHTNING = (
    LightningCall((70, 0, 5, 300), is_packed=True, H=2, HV=2, per_seq=1, num_blocks=3, pool_dtype=None),
    LightningCall((900, 33, 1), is_packed=True, H=2, HV=2, per_seq=2, num_blocks=5, pool_dtype=None),
)
LONG_OF_LIGHTNING = (
    LightningCall((1500, 1, 700, 2300), is_packed=True, H=8, HV=8, per_seq=1, num_blocks=132, pool_dtype=None),
    LightningCall((4096, 4096), is_packed=False, H=8, HV=8, per_seq=4, num_blocks=132, pool_dtype=None),
)


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference between a kernel and the torch backend, of all gradients of its calls."""
    family = name.split("_")[1]
    both = {"kda": kda, "gdn": gdn, "lightning": lightning}[family](name, device, sm)
    return max(relative_difference(got[key], want[key]) for got, want in both for key in want if want[key] is not None)  # type: ignore[arg-type]


def kda(name: str, device: torch.device, sm: tuple[int, int]) -> Iterator[tuple[Grads, Grads]]:
    """(Ours, torch's) of each call."""
    from cula.ops.torch import kda as right

    for call in _chosen(CALLS, LONG, device):
        p, x = kda_self_check.make(call, Flags.of(name.removeprefix("bwd_")), device, sm)
        (do, dht), schedule = gradients_of_outputs(p, device), split_into(p, call.per_segment, has_transitions=True)
        got, want = kda_bwd.run(p, x, do, dht, schedule)._asdict(), right.kda_bwd(p, x, (), do, dht)._asdict()
        yield beside_biases(got, want)
        M, B = kda_bwd.transition(p, x, schedule)
        C, right_C = kda_bwd.state_grad(p, x, do, None, schedule), right.kda_state_grad(p, x, do)
        if x.initial_state is not None:  # steep gates leave next to nothing of C, and fp16 less: beside the whole gradient
            C, right_C = (torch.cat([c, grads["d_initial_state"]]) for c, grads in ((C, got), (right_C, want)))
        yield {"M": M, "B": B, "C": C}, dict(zip("MBC", (*right.kda_transition(p, x), right_C)))


def gdn(name: str, device: torch.device, sm: tuple[int, int]) -> Iterator[tuple[Grads, Grads]]:
    from cula.ops.torch.gdn import gdn_bwd as right

    flags = Flags.of(f"kda_f16_{name.removeprefix('bwd_gdn_')}_scalar")
    for call in _chosen(CALLS, LONG, device):
        of_kda, tensors = kda_self_check.make(call, flags, device, sm)
        options = GdnOptions(**{field: getattr(of_kda.options, field) for field in GdnOptions._fields})
        p, x = check_gdn(GdnInputs(*tensors), options)
        p, (do, dht) = dataclasses.replace(p, sm=sm), gradients_of_outputs(p, device)
        got = gdn_bwd.run(p, x, do, dht, split_into(p, call.per_segment, has_transitions=True))
        yield beside_biases(got._asdict(), right(p, x, (), do, dht)._asdict())


def lightning(name: str, device: torch.device, sm: tuple[int, int]) -> Iterator[tuple[Grads, Grads]]:
    from cula.ops.torch.lightning import lightning_bwd as right

    kernel, D = lightning_self_check.kernel_of(name)
    for call in _chosen(OF_LIGHTNING, LONG_OF_LIGHTNING, device):
        p, x = lightning_self_check.make(call, D, device, sm)
        do, dht = gradients_of_outputs(p, device)
        got = lightning_bwd.run(p, x, make_schedule(p, kernel, call.per_seq, call.num_blocks, BACKWARD), do, dht)
        yield got._asdict(), dict(zip(got._fields, right(p, x, (), do, dht)))


def _chosen(calls: tuple, long: tuple, device: torch.device) -> tuple:
    return calls if device.type == "cpu" else calls + long


def beside_biases(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> tuple[Grads, Grads]:
    """The same, with gradients of A_log, sums over channels and tokens that may cancel, beside those of the biases."""
    if (d_bias := want["ddt_bias"]) is not None:
        got, want = ({**grads, "dA_log": torch.cat([grads["dA_log"].flatten(), d_bias.flatten()])} for grads in (got, want))  # type: ignore[union-attr]
    return got, want


def gradients_of_outputs(p: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random gradients of o and of the last states."""
    random = torch.Generator().manual_seed(1)
    do = torch.randn(p.B, p.T, p.HV, p.V, generator=random)
    return do.to(device, p.dtype), (0.3 * torch.randn(p.N, p.HV, p.V, p.K, generator=random)).to(device)
