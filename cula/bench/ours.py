# SPDX-License-Identifier: Apache-2.0
"""cuLA as a contender: the same interface as a peer, the choice of backend left to its dispatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import cula
from cula.bench.cases import Case
from cula.bench.check import Outputs
from cula.bench.family import Leaves, bench_of
from cula.bench.inputs import Inputs, make
from cula.bench.peers import Call, Peer, read_pair, training_call
from cula.core.dispatch import Choice
from cula.core.explain import explain_call
from cula.core.family import FAMILIES

NUM_LENGTHS = 63  # of calls whose length changes each time, beside that of the case


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
        if x.case.mode == "host-lengths":
            return self._of_many_lengths(x)
        function, args, options = self.call(x)
        if x.case.has("pool"):
            assert x.state_indices is not None
            pool, slots = options["state_pool"], x.state_indices.long()
            return Call(lambda: function(*args, **options), lambda done: {"o": done[0], "state": pool[slots]})
        return Call(lambda: function(*args, **options), read_pair)

    def _of_many_lengths(self, x: Inputs) -> Call:
        """Calls of lengths around the case's in turn, beginning with its own: as a serving engine makes them."""
        (length,) = x.case.lens
        lengths = [length // 2 + i * length // NUM_LENGTHS for i in torch.randperm(NUM_LENGTHS).tolist()]
        inputs = [x, *(make(replace(x.case, lens=(n,)), x.device) for n in lengths)]
        in_turn = itertools.cycle([self.call(one) for one in inputs])

        def run() -> Any:
            function, args, options = next(in_turn)
            return function(*args, **options)

        return Call(run, read_pair, f"{NUM_LENGTHS + 1} lengths in turn, {min(lengths)} to {max(lengths)} tokens")

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
        if case.has("pool"):
            del options["initial_state"], options["output_final_state"]
            options |= {"state_pool": x.pool(), "initial_state_indices": x.state_indices}
        if case.mode == "host-pool":
            pool = options.pop("initial_state").clone()
            options |= {"state_pool": pool, "initial_state_indices": torch.arange(len(pool), dtype=torch.int32, device=x.device)}
        if case.has("invariant"):
            options["batch_invariant"] = True
        if case.packed:
            options["cu_seqlens"] = x.cu_seqlens
        return FAMILIES[case.family].load_entry(), args, options

    def _decode(self, x: Inputs) -> Call:
        assert x.h0 is not None and x.state_indices is not None
        pool, slots = x.h0.clone(), x.state_indices.long()
        out = None if x.case.mode == "host-o" else torch.empty_like(x.v)
        _, (q, k, v, _pool), options = self.call(x)
        if x.case.has("keep"):
            options["intermediate_states"] = pool.new_empty(x.case.N, x.case.lens[0], *pool.shape[1:])

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
