# SPDX-License-Identifier: Apache-2.0
"""Libraries to stand beside: one small interface, and an adapter of a few lines for each.

An adapter prepares everything a user of that library would have at hand (its layout, its offsets, its output buffers)
outside the timed call, and hands back the call and how to read its result in cuLA's layout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula.bench.cases import Case
from cula.bench.check import Outputs
from cula.bench.inputs import Inputs

GATHERED = "takes no slot indices: it was given its states gathered beforehand"
UNBOUNDED = ("init", "softplus")  # gates that not all libraries activate


@dataclass(frozen=True)
class Call:
    """What is timed, and how to read what it returned (or wrote) as o, state and gradients."""

    run: Callable[[], Any]
    read: Callable[[Any], Outputs]
    note: str = ""  # what a reader should know about the comparison


class Peer:
    """A library. Subclasses say what they serve and how to call it."""

    name: str
    title: str
    module: str  # importable when it is installed
    package: str  # its distribution, for the version
    install: str
    tunes = False  # whether its Triton kernels come in many variants, of which it measures the best

    def missing(self) -> str | None:
        """What to install, as a sentence; None if it is there."""
        if importlib.util.find_spec(self.module) is None:
            return f"not installed ({self.install})"
        return None

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(self.module), "__version__", "unknown"))

    def why_not(self, case: Case) -> str | None:
        """Why the library has nothing to compare with this case, as a sentence; None if it has."""
        raise NotImplementedError

    def prepare(self, x: Inputs) -> Call:
        raise NotImplementedError


def training_call(x: Inputs, forward: Callable[[dict[str, Tensor | None]], tuple[Tensor, Any]], note: str = "") -> Call:
    """Forward and backward as one call, gradients of every input. `forward` takes the leaves by name."""
    given = x.leaves()
    leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in given.items()}
    wanted = {name: t for name, t in leaves.items() if t is not None}

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        o, _ = forward(leaves)
        return o, torch.autograd.grad(o, list(wanted.values()), x.do)

    def read(result: Any) -> Outputs:
        o, grads = result
        return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(wanted, grads)}

    return Call(run, read, note)


def read_pair(result: Any) -> Outputs:
    """(o, state or None), state [N, HV, V, K]."""
    o, state = result
    return {"o": o} if state is None else {"o": o, "state": state}


def on_a_pool(x: Inputs, forward: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Call:
    """For a library that has no pools in its prefill: what its callers do around it, states gathered and scattered."""
    assert x.state_indices is not None
    pool, slots = x.pool(), x.state_indices.long()

    def run() -> Tensor:
        o, state = forward(pool[slots].float())
        pool[slots] = state.to(pool.dtype)
        return o

    return Call(run, lambda o: {"o": o, "state": pool[slots]}, "states gathered from the pool and scattered back around it")


class Fla(Peer):
    name, title = "fla", "FLA"
    module, package, install = "fla", "fla-core", "pip install fla-core"
    tunes = True
    # By itself it hands calls to libraries that are installed and measured on their own here.
    switches_off = {"FLA_FLASH_KDA": "0", "FLA_FLASH_QLA": "0"}

    def why_not(self, case: Case) -> str | None:
        if not torch.cuda.is_available():
            return "its kernels need a GPU"
        if case.is_decode and case.lens[0] > 1:
            return "several tokens a row: its draft tokens need a slot each"
        if case.family not in ("kda", "gdn", "lightning"):
            return "not compared on this family"
        if case.family == "lightning" and case.HV != case.H:
            return "its Lightning kernels take as many value heads as query/key heads"
        if case.is_decode and case.has("scalar"):
            return "its gated delta rule decode takes no pool of states"
        return None

    def prepare(self, x: Inputs) -> Call:
        case = x.case
        os.environ.update(self.switches_off)
        if case.is_decode:
            by_family = {"kda": self._kda_decode, "gdn": self._gdn_decode, "lightning": self._lightning_decode}
            return by_family[case.family](x)
        packing = {}
        if case.packed:
            offsets = x.offsets(torch.int64)
            packing = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.cpu()}
        common: dict[str, Any] = {"output_final_state": case.has("ht") or case.has("pool"), "state_v_first": True, **packing}
        if case.family == "lightning":
            chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            assert x.decay is not None
            g_gamma = -x.decay

            def forward(t: dict[str, Tensor | None]) -> Any:
                return chunk_simple_gla(t["q"], t["k"], t["v"], g_gamma=g_gamma, initial_state=t["h0"], **common)

        elif case.family == "gdn" or case.has("scalar"):
            chunk_gdn = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            switches = x.switches()
            switches.pop("lower_bound")

            def forward(t: dict[str, Tensor | None]) -> Any:
                switches.update(A_log=t["A_log"], dt_bias=t["dt_bias"])
                return chunk_gdn(t["q"], t["k"], t["v"], t["g"], t["beta"], initial_state=t["h0"], **switches, **common)

        else:
            chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
            switches = x.switches() | {"safe_gate": x.lower_bound is not None}

            def forward(t: dict[str, Tensor | None]) -> Any:
                bias = t["dt_bias"]
                switches.update(A_log=t["A_log"], dt_bias=None if bias is None else bias.reshape(-1))
                return chunk_kda(t["q"], t["k"], t["v"], t["g"], t["beta"], initial_state=t["h0"], **switches, **common)

        if case.is_train:
            return training_call(x, forward)
        tensors = x.leaves()
        if case.has("pool"):
            return on_a_pool(x, lambda h0: forward(tensors | {"h0": h0}))
        return Call(lambda: forward(tensors), read_pair)

    def _kda_decode(self, x: Inputs) -> Call:
        step = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        assert x.h0 is not None and x.state_indices is not None
        pool, slots, out = x.h0.clone(), x.state_indices, torch.empty_like(x.v)
        options = x.switches() | {"initial_state": pool, "ssm_state_indices": slots, "state_v_first": True, "out": out}
        return Call(
            lambda: step(x.q, x.k, x.v, x.g, x.beta, inplace_final_state=True, **options),
            lambda _: {"o": out, "state": pool[slots.long()]},
        )

    def _gdn_decode(self, x: Inputs) -> Call:
        step = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        assert x.h0 is not None and x.state_indices is not None
        switches = x.switches()
        switches.pop("lower_bound")
        options = switches | {"output_final_state": True, "state_v_first": True}
        options |= {"g": x.g, "beta": x.beta, "initial_state": x.h0[x.state_indices.long()].contiguous()}
        return Call(lambda: step(x.q, x.k, x.v, **options), read_pair, GATHERED)

    def _lightning_decode(self, x: Inputs) -> Call:
        step = importlib.import_module("fla.ops.simple_gla").fused_recurrent_simple_gla
        assert x.h0 is not None and x.state_indices is not None and x.decay is not None
        states, g_gamma = x.h0[x.state_indices.long()].contiguous(), -x.decay
        options = {"initial_state": states, "output_final_state": True, "state_v_first": True}
        return Call(
            lambda: step(x.q, x.k, x.v, g_gamma=g_gamma, **options),
            read_pair,
            GATHERED,
        )


class CudnnFrontend(Peer):
    name, title = "cudnn", "cuDNN frontend"
    module, package, install = "cudnn", "nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend"

    def why_not(self, case: Case) -> str | None:
        if case.op not in ("kda_prefill", "kda_train") or case.has("scalar"):
            return "its KDA is what is compared here"
        if case.is_train and (case.HV != case.H or set(case.flags) != {"f32"}):
            return "its Hopper backward takes HV = H, float32 log decays, and norm and sigmoid applied beforehand (--flags f32)"
        if case.has("pool"):
            return "its kernel takes no pool of states here"
        if case.has("gate") and case.gate in UNBOUNDED:
            return "its in-kernel gate is the bounded one only"
        if case.dtype != "bfloat16" or (case.K, case.V) != (128, 128):
            return "its Hopper kernel takes bf16 and K = V = 128"
        return None

    def prepare(self, x: Inputs) -> Call:
        kda = importlib.import_module("cudnn.linear_attention").kimi_delta_attention
        assert x.g is not None and x.beta is not None
        if x.case.is_train:
            offsets = x.offsets(torch.int32)

            def forward(t: dict[str, Tensor | None]) -> Any:
                o, state = kda(*(x.packed(t[name]) for name in ("q", "k", "v", "g", "beta")), offsets)  # type: ignore[arg-type]
                return o.view(x.v.shape), state

            return training_call(x, forward)
        tensors = [x.packed(t).contiguous() for t in (x.q, x.k, x.v, x.g.float(), x.beta.float())]
        offsets = x.offsets(torch.int32)
        options: dict[str, Any] = {
            "initial_state": x.h0,
            "output_final_state": x.case.has("ht"),
            "use_qk_l2norm_in_kernel": x.case.has("norm"),
            "use_beta_sigmoid_in_kernel": x.case.has("sigmoid"),
        }
        if x.case.has("gate"):
            options |= {"safe_gate": True, "gate_lower_bound": x.lower_bound, "a_log": x.A_log, "dt_bias": x.dt_bias}

        def read(result: Any) -> Outputs:
            o, state = result  # without a last state, one of no rows
            return read_pair((o.view(x.v.shape), state if x.case.has("ht") else None))

        return Call(
            lambda: kda(*tensors, offsets, **options),
            read,
            "given gates and betas in float32, as its kernel reads them: bf16 it would convert in every call",
        )


class FlashKda(Peer):
    name, title = "flashkda", "FlashKDA"
    module, package = "flash_kda", "flash_kda"
    install = "built from its sources by tools/flashkda.py"

    def why_not(self, case: Case) -> str | None:
        if case.op != "kda_prefill" or case.has("scalar"):
            return "it has a KDA forward only"
        if case.has("pool"):
            return "its kernel takes no pool of states"
        if case.gate in UNBOUNDED or not {"gate", "sigmoid", "norm"} <= set(case.flags):
            return "its kernel always applies the bounded gate, the sigmoid and the norm"
        if case.dtype != "bfloat16" or case.H != case.HV or (case.K, case.V) != (128, 128):
            return "it takes bf16, HV = H and K = V = 128"
        return None

    def prepare(self, x: Inputs) -> Call:
        fwd = importlib.import_module("flash_kda").fwd
        tensors = [x.packed(t)[None].contiguous() for t in (x.q, x.k, x.v, x.g, x.beta) if t is not None]
        out = torch.empty_like(tensors[2])
        assert x.A_log is not None
        state = x.v.new_empty(x.case.N, x.case.HV, x.case.V, x.case.K, dtype=torch.float32) if x.case.has("ht") else None
        options = {"initial_state": x.h0, "final_state": state, "cu_seqlens": x.offsets(torch.int64)}
        fixed = (x.case.K**-0.5, out, x.A_log, x.dt_bias, x.lower_bound)
        return Call(lambda: fwd(*tensors, *fixed, **options), lambda _: read_pair((out.view(x.v.shape), state)))


class GatedDeltaRule(Peer):
    """Libraries without KDA on this hardware, compared where there is one gate a head: Gated DeltaNet, and KDA like it."""

    ops: tuple[str, ...] = ("gdn_prefill",)
    has_norm = False  # whether it normalises q and k itself

    def why_not(self, case: Case) -> str | None:
        if case.op not in self.ops and not (case.op == "kda_prefill" and case.has("scalar")):
            return f"compared on {', '.join(self.ops)}, and on KDA with one gate a head (--flags h0,ht,scalar)"
        if not case.is_decode and {"gate", "sigmoid"} & set(case.flags):
            return "compared with the gate and the sigmoid applied beforehand"
        if not case.is_decode and case.has("norm") and not self.has_norm:
            return "compared with the norm applied beforehand"
        return None


class FlashQla(GatedDeltaRule):
    name, title = "flashqla", "FlashQLA"
    module, package, install = "flash_qla", "flash-qla", "pip install flash-qla"
    ops = ("gdn_prefill", "gdn_train")
    has_norm = True

    def prepare(self, x: Inputs) -> Call:
        rule = importlib.import_module("flash_qla").chunk_gated_delta_rule
        assert x.g is not None and x.beta is not None
        options = {
            "output_final_state": x.case.has("ht"),
            "use_qk_l2norm_in_kernel": x.case.has("norm"),
            "cu_seqlens": x.cu_seqlens,
            "state_v_first": True,
        }
        if x.case.is_train:
            return training_call(x, lambda t: rule(t["q"], t["k"], t["v"], t["g"], t["beta"], initial_state=t["h0"], **options))
        g, beta = x.g.float(), x.beta.float()
        return Call(lambda: rule(x.q, x.k, x.v, g, beta, initial_state=x.h0, **options), read_pair)


class FlashInfer(GatedDeltaRule):
    name, title = "flashinfer", "FlashInfer"
    module, package, install = "flashinfer", "flashinfer-python", "pip install flashinfer-python"
    ops = ("gdn_prefill", "gdn_decode")

    def why_not(self, case: Case) -> str | None:
        if case.is_decode and not {"gate", "sigmoid", "norm"} <= set(case.flags):
            return "its decode applies the gate, the sigmoid and the norm"
        return super().why_not(case)

    def prepare(self, x: Inputs) -> Call:
        if x.case.is_decode:
            return self._decode(x)
        rule = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
        assert x.g is not None and x.beta is not None
        q, k, v, g, beta = (x.packed(t).contiguous() for t in (x.q, x.k, x.v, x.g.float().exp(), x.beta.float()))
        options = {"initial_state": x.h0, "output_final_state": x.case.has("ht"), "cu_seqlens": x.offsets(torch.int64)}

        def read(result: Any) -> Outputs:
            o, state = result if isinstance(result, tuple) else (result, None)
            return read_pair((o.view(x.v.shape), state))

        return Call(lambda: rule(q, k, v, g, beta, **options), read)

    def _decode(self, x: Inputs) -> Call:
        """Its kernel for states [V, K]: one token, or several on bfloat16 states; its kernel for drafts on float32 ones."""
        module = importlib.import_module("flashinfer.gdn_decode")
        assert x.h0 is not None and x.state_indices is not None and x.g is not None and x.beta is not None
        pool, slots = x.h0.clone(), x.state_indices
        gates = (x.A_log, x.g, x.dt_bias, x.beta)

        def drafts() -> Any:
            return module.gated_delta_rule_mtp(x.q, x.k, x.v, pool, slots, *gates, disable_state_update=False)

        def step() -> Any:
            states = {"initial_state": pool, "initial_state_indices": slots}
            return module.gated_delta_rule_decode_pretranspose(x.q, x.k, x.v, None, *gates, **states)

        run = drafts if x.case.lens[0] > 1 and pool.dtype == torch.float32 else step
        return Call(run, lambda done: {"o": done[0], "state": pool[slots.long()]})


PEERS: tuple[Peer, ...] = (Fla(), CudnnFrontend(), FlashKda(), FlashQla(), FlashInfer())
