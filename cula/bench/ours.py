# SPDX-License-Identifier: Apache-2.0
"""cuLA as a contender: the same interface as a peer, the choice of backend left to its dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

import cula
from cula import contract, dispatch
from cula.bench.cases import Case
from cula.bench.check import Outputs
from cula.bench.inputs import Inputs
from cula.bench.peers import LEAVES, Call, Peer, read_pair, training_call

Signature = tuple[str, tuple[Any, ...], dict[str, Any]]  # the name `cula.explain` knows, and the arguments


class Cula(Peer):
    name, title = "cula", "cuLA"
    module, package, install = "cula", "cuda-linear-attention", "pip install -e ."

    def __init__(self, backend: str = "auto"):
        self.backend = backend

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return cula.__version__

    def why_not(self, case: Case) -> str | None:
        return None

    def prepare(self, x: Inputs) -> Call:
        if x.case.is_decode:
            return self._decode(x)
        function = cula.cula_kda if x.case.is_kda else cula.cula_lightning

        def forward(t: dict[str, Tensor | None]) -> Any:
            _, args, options = self.signature(x, t)
            return function(*args, **options)

        if x.case.is_train:
            return training_call(x, forward)
        _, args, options = self.signature(x)
        return Call(lambda: function(*args, **options), read_pair)

    def signature(self, x: Inputs, leaves: dict[str, Tensor | None] | None = None) -> Signature:
        """The call in cuLA's own words."""
        case, t = x.case, leaves or {name: getattr(x, name) for name in LEAVES}
        if case.is_decode:
            options: dict[str, Any] = {"state_indices": x.state_indices, "backend": self.backend}
            if not case.is_kda:
                return "decode", (t["q"], t["k"], t["v"], t["h0"]), options | {"mode": "lightning", "decay": x.decay}
            options |= x.switches() | {"g": t["g"], "beta": t["beta"]}
            return "decode", (t["q"], t["k"], t["v"], t["h0"]), options
        options = {"initial_state": t["h0"], "output_final_state": case.has("ht"), "backend": self.backend}
        if case.packed:
            options["cu_seqlens"] = x.cu_seqlens
        if not case.is_kda:
            return "lightning", (t["q"], t["k"], t["v"], x.decay), options
        options |= x.switches() | {"A_log": t["A_log"], "dt_bias": t["dt_bias"]}
        options["safe_gate"] = case.has("gate") and x.lower_bound is not None
        return "kda", (t["q"], t["k"], t["v"], t["g"], t["beta"]), options

    def _decode(self, x: Inputs) -> Call:
        assert x.h0 is not None and x.state_indices is not None
        pool, slots = x.h0.clone(), x.state_indices.long()
        out = None if x.case.mode == "host-o" else torch.empty_like(x.v)
        _, (q, k, v, _pool), options = self.signature(x)

        def read(done: Any) -> Outputs:
            return {"o": done[0] if out is None else out, "state": pool[slots]}

        return Call(lambda: cula.cula_decode(q, k, v, pool, out=out, **options), read)

    def explain(self, x: Inputs) -> dispatch.Choice:
        """Which backend takes the call, and why each better one does not."""
        name, args, options = self.signature(x)
        return cula.explain(name, *args, **options)

    def backward_backend(self, x: Inputs) -> str | None:
        """Which backend's backward runs; None outside training."""
        if not x.case.is_train:
            return None
        op = "kda_bwd" if x.case.is_kda else "lightning_bwd"
        return dispatch.choose(op, self._checked(x)(), self.backend).name

    def dispatch_only(self, x: Inputs) -> Callable[[], Any]:
        """The checks and the choice of a call, and nothing else: what dispatch costs the host."""
        op = {"kda": "kda_fwd", "lightning": "lightning_fwd", "decode": "decode"}[self.signature(x)[0]]
        problem = self._checked(x)
        return lambda: dispatch.choose(op, problem(), self.backend)

    def _checked(self, x: Inputs) -> Callable[[], dispatch.Problem]:
        """The contract's part of a call, its options made beforehand."""
        name, args, given = self.signature(x)
        if name == "kda":
            switches = contract.KdaOptions(**_known(contract.KdaOptions, given))
            tensors = contract.KdaInputs(*(*args, x.A_log, x.dt_bias, x.h0, x.cu_seqlens))
            return lambda: contract.check_kda(tensors, switches)[0]
        if name == "lightning":
            lightning, wants_state = contract.LightningInputs(*(*args, x.h0, x.cu_seqlens)), x.case.has("ht")
            return lambda: contract.check_lightning(lightning, output_final_state=wants_state)[0]
        decode_switches = contract.DecodeOptions(**_known(contract.DecodeOptions, given), is_kda=x.case.is_kda)
        rows = contract.DecodeInputs(*(*args, x.state_indices, x.g, x.beta, x.A_log, x.dt_bias, x.decay))
        return lambda: contract.check_decode(rows, decode_switches)[0]


def _known(options: Any, given: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(options)}
    return {key: value for key, value in given.items() if key in names}
