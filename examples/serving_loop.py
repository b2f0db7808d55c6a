# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on state pools: requests come and go, slots are reused, and every answer is checked.

    python examples/serving_loop.py                  # seconds, with or without a GPU

A model of a KDA and a Lightning layer serves more requests than it has rows. At each step
  1. requests that wait take free rows and free slots; their prompts are packed into one sequence of tokens and prefilled
     with one call a layer, which leaves each last state in the request's slot (`state_pool`, `initial_state_indices`);
  2. all rows decode one token with one call a layer, each from its slot and back into it; a row without a request has
     slot -1, which is neither read nor written. On a GPU this step is a CUDA graph, captured once: only the numbers in
     its input tensors change, so requests coming and going cost nothing.

A finished request is run again alone, with its own pool and no graph, and its logits are compared.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cula import cula_decode, cula_kda, cula_lightning

VOCABULARY = 256
GATES = {
    "use_gate_in_kernel": True,
    "lower_bound": -5.0,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Model:
    """Embedding, a KDA layer, a Lightning layer, logits. Random weights: what it says means nothing, but it must not vary."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        self.H, self.D, self.device, self.dtype = num_heads, head_dim, device, dtype
        width = num_heads * head_dim
        gen = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=gen) / shape[0] ** 0.5).to(device, dtype)

        self.embedding = weight(VOCABULARY, width) * VOCABULARY**0.5
        self.kda_in, self.lightning_in = weight(width, 4 * width + num_heads), weight(width, 3 * width)
        self.kda_out, self.lightning_out = weight(width, width), weight(width, width)
        self.A_log = torch.linspace(-3.0, 0.0, num_heads, device=device)
        self.dt_bias = torch.zeros(num_heads, head_dim, device=device)
        self.decay = torch.tensor([2.0 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)], device=device)

    def pools(self, slots: int) -> list[Tensor]:
        """A pool a layer, [slots, H, D, D]. NaN, because a slot holds nothing until a prefill has written it."""
        shape = (slots, self.H, self.D, self.D)
        return [torch.full(shape, float("nan"), device=self.device) for _ in range(2)]

    def prefill(self, tokens: Tensor, cu_seqlens: Tensor, pools: list[Tensor], slots: Tensor) -> Tensor:
        """Packed prompts, tokens [T]; each starts from zero and leaves its state in its slot. Returns logits [N, 256]."""
        place = dict(
            cu_seqlens=cu_seqlens,
            initial_state_indices=slots,
            has_initial_state=torch.zeros(len(slots), dtype=torch.bool, device=self.device),
        )
        x = self.embedding[tokens][None]  # [1, T, width]
        o, _ = cula_kda(**self._kda(x), **GATES, safe_gate=True, state_pool=pools[0], **place)
        x = self._add(x, o, self.kda_out)
        o, _ = cula_lightning(*self._lightning(x), self.decay, state_pool=pools[1], **place)
        x = self._add(x, o, self.lightning_out)
        return self._logits(x[0, cu_seqlens[1:].long() - 1])

    def decode(self, tokens: Tensor, pools: list[Tensor], slots: Tensor) -> Tensor:
        """One token a row, tokens [N]; slots [N], -1 for rows without a request. Returns logits [N, 256]."""
        x = self.embedding[tokens][:, None]  # [N, 1, width]
        o, _ = cula_decode(**self._kda(x), **GATES, state=pools[0], state_indices=slots)
        x = self._add(x, o, self.kda_out)
        q, k, v = self._lightning(x)
        o, _ = cula_decode(q, k, v, pools[1], mode="lightning", decay=self.decay, state_indices=slots)
        x = self._add(x, o, self.lightning_out)
        return self._logits(x[:, 0])

    def _kda(self, x: Tensor) -> dict[str, Tensor]:
        mixed = _norm(x) @ self.kda_in
        q, k, v, g = mixed[..., : -self.H].unflatten(-1, (4, self.H, self.D)).unbind(-3)
        return {"q": q, "k": k, "v": v, "g": g, "beta": mixed[..., -self.H :], "A_log": self.A_log, "dt_bias": self.dt_bias}

    def _lightning(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_norm(x) @ self.lightning_in).unflatten(-1, (3, self.H, self.D)).unbind(-3)
        return _norm(q), _norm(k) * self.D**-0.5, v

    def _add(self, x: Tensor, o: Tensor, weight: Tensor) -> Tensor:
        return x + _norm(o).flatten(-2) @ weight

    def _logits(self, x: Tensor) -> Tensor:
        return (_norm(x) @ self.embedding.T).float()


def _norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


@dataclass
class Request:
    prompt: list[int]
    num_wanted: int  # tokens to generate
    slot: int = -1
    tokens: list[int] = field(default_factory=list)  # generated
    logits: list[Tensor] = field(default_factory=list)  # that each of them was taken from


class Server:
    """Rows of a decode batch, slots of the pools, and the requests that hold them."""

    def __init__(self, model: Model, num_rows: int, num_slots: int):
        self.model, self.pools = model, model.pools(num_slots)
        self.rows: list[Request | None] = [None] * num_rows
        self.free_slots = list(range(num_slots))
        self.waiting: deque[Request] = deque()
        self.num_steps = self.num_prefills = 0
        # The decode step reads these and writes `logits`; what they hold changes, where they are does not.
        self.tokens = torch.zeros(num_rows, dtype=torch.long, device=model.device)
        self.slots = torch.full((num_rows,), -1, dtype=torch.int32, device=model.device)
        self.logits = torch.empty(num_rows, VOCABULARY, device=model.device)
        self.graph = self._capture() if model.device.type == "cuda" else None

    def _decode(self) -> None:
        self.logits.copy_(self.model.decode(self.tokens, self.pools, self.slots))

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode()  # compiles; all slots are -1, so no state is touched
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph

    def step(self) -> list[Request]:
        """Admit, prefill, decode once; returns the requests that are finished now."""
        finished = self._admit()
        if any(self.rows):
            self.tokens.copy_(torch.tensor([request.tokens[-1] if request else 0 for request in self.rows]))
            self.slots.copy_(torch.tensor([request.slot if request else -1 for request in self.rows]))
            self.graph.replay() if self.graph else self._decode()
            self.num_steps += 1
            for row, request in enumerate(self.rows):
                if request:
                    self._take(request, self.logits[row])
                    if len(request.tokens) == request.num_wanted:
                        finished.append(self._leave(row))
        return finished

    def _admit(self) -> list[Request]:
        new: list[int] = []
        for row, request in enumerate(self.rows):
            if request is None and self.waiting and self.free_slots:
                self.rows[row] = self.waiting.popleft()
                self.rows[row].slot = self.free_slots.pop(random.randrange(len(self.free_slots)))
                new.append(row)
        if not new:
            return []
        requests = [self.rows[row] for row in new]
        device = self.model.device
        packed = torch.tensor([t for r in requests for t in r.prompt], device=device)
        lengths = torch.tensor([0] + [len(r.prompt) for r in requests])
        slots = torch.tensor([r.slot for r in requests], dtype=torch.int32, device=device)
        logits = self.model.prefill(packed, lengths.cumsum(0).to(device, torch.int32), self.pools, slots)
        self.num_prefills += 1
        for request, its in zip(requests, logits):
            self._take(request, its)
        return [self._leave(row) for row in new if self.rows[row].num_wanted == 1]

    @staticmethod
    def _take(request: Request, logits: Tensor) -> None:
        request.logits.append(logits.clone())
        request.tokens.append(int(logits.argmax()))

    def _leave(self, row: int) -> Request:
        request = self.rows[row]
        self.rows[row] = None
        self.free_slots.append(request.slot)
        return request


def alone(model: Model, request: Request) -> Tensor:
    """The logits of a request that has the machine to itself and says the same tokens, [tokens, 256]."""
    pools, slot = model.pools(1), torch.zeros(1, dtype=torch.int32, device=model.device)
    prompt = torch.tensor(request.prompt, device=model.device)
    cu_seqlens = torch.tensor([0, len(prompt)], dtype=torch.int32, device=model.device)
    logits = [model.prefill(prompt, cu_seqlens, pools, slot)[0]]
    for token in request.tokens[:-1]:
        logits.append(model.decode(torch.tensor([token], device=model.device), pools, slot)[0])
    return torch.stack(logits)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="requests decoded at once")
    parser.add_argument("--slots", type=int, default=6, help="states the pools have room for")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    random.seed(0)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    model = Model(4 if on_gpu else 2, 128 if on_gpu else 32, device, torch.bfloat16 if on_gpu else torch.float32)
    tolerance = 5e-2 if on_gpu else 1e-3  # bf16 sums differ with the shape of a matrix product
    server = Server(model, args.rows, args.slots)
    coming = deque(
        Request([random.randrange(VOCABULARY) for _ in range(random.randint(1, 150))], random.randint(1, 12))
        for _ in range(args.requests)
    )
    print(f"{args.requests} requests, {args.rows} rows, {args.slots} slots, on {device}, {'graph' if on_gpu else 'eager'} decode")
    num_done, worst = 0, 0.0
    while num_done < args.requests:
        for _ in range(random.randint(0, 3)):
            if coming:
                server.waiting.append(coming.popleft())
        for request in server.step():
            want = alone(model, request)
            got = torch.stack(request.logits)
            error = float((got - want).norm() / want.norm())
            verdict = "as when alone" if error < tolerance else "NOT as when alone"
            print(
                f"  prompt {len(request.prompt):3}, {len(request.tokens):2} tokens, slot {request.slot}: {verdict} ({error:.1e})"
            )
            if error >= tolerance:
                raise SystemExit("a request depends on its neighbours")
            num_done, worst = num_done + 1, max(worst, error)
    print(f"{num_done} requests in {server.num_steps} decode steps and {server.num_prefills} prefills; worst error {worst:.1e}")


if __name__ == "__main__":
    main()
