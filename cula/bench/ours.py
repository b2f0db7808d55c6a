# SPDX-License-Identifier: Apache-2.0
"""cuLA as a contender: the same interface as a peer, the choice of backend left to its dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cula
from cula.bench.cases import Case
from cula.bench.check import Outputs
from cula.bench.family import Leaves, bench_of
from cula.bench.inputs import Inputs
from cula.bench.peers import Call, Peer, read_pair, training_call
from cula.core.dispatch import Choice
from cula.core.explain import explain_call
from cula.core.family import FAMILIES


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

        def forward(leaves: Leaves) -> Any:
            function, args, options = self.call(x, leaves)
            return function(*args, **options)

        if x.case.is_train:
            return training_call(x, forward)
        function, args, options = self.call(x)
        return Call(lambda: function(*args, **options), read_pair)

    def call(self, x: Inputs, leaves: Leaves | None = None) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The call in cuLA's own words: function of level 1, arguments, keywords."""
        case, t = x.case, x.leaves() if leaves is None else leaves
        bench = bench_of(case.family)
        options: dict[str, Any] = {"backend": self.backend}
        if case.is_decode:
            options |= {"mode": case.family, "state_indices": x.state_indices, **bench.decode(x, t)}
            return cula.cula_decode, (t["q"], t["k"], t["v"], t["h0"]), options
        args, own = bench.call(x, t)
        options |= {"initial_state": t["h0"], "output_final_state": case.has("ht"), **own}
        if case.packed:
            options["cu_seqlens"] = x.cu_seqlens
        return FAMILIES[case.family].load_entry(), args, options

    def _decode(self, x: Inputs) -> Call:
        assert x.h0 is not None and x.state_indices is not None
        pool, slots = x.h0.clone(), x.state_indices.long()
        out = None if x.case.mode == "host-o" else torch.empty_like(x.v)
        _, (q, k, v, _pool), options = self.call(x)

        def read(done: Any) -> Outputs:
            return {"o": done[0] if out is None else out, "state": pool[slots]}

        return Call(lambda: cula.cula_decode(q, k, v, pool, out=out, **options), read)

    def explain(self, x: Inputs) -> Choice:
        """Which backend takes the call, and why each better one does not; in training, of the backward too."""
        leaves = {name: None if t is None else t.detach().requires_grad_(x.case.is_train) for name, t in x.leaves().items()}
        function, args, options = self.call(x, leaves)
        return explain_call(function, *args, **options)

    def dispatch_only(self, x: Inputs) -> Callable[[], Any]:
        """The checks and the choice of a call, and nothing else: what dispatch costs the host."""
        function, args, options = self.call(x)
        return lambda: explain_call(function, *args, **options)
