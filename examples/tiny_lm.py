# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model of a few KDA layers, small enough to read: how a model calls cuLA.

Training and prefill call `cula_kda` on whole sequences. Generation keeps one state a layer and calls `cula_decode` for
each token: the cost of a token does not grow with the length of the text before it.

    python examples/tiny_lm.py [--steps 60] [--text FILE] [--prompt "def "]      # train on a text, this file, and sample
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from cula import cula_decode, cula_kda


class KdaMixer(nn.Module):
    """Token mixing: projections to q, k, v, gate and beta around one KDA call, with every activation in the kernel."""

    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        inner = num_heads * head_dim
        self.qkvg = nn.Linear(dim, 4 * inner, bias=False)
        self.beta = nn.Linear(dim, num_heads, bias=False)
        self.out_gate = nn.Linear(dim, inner)
        self.out = nn.Linear(inner, dim, bias=False)
        # decays start between "forgets within a few tokens" and "remembers hundreds"
        self.A_log = nn.Parameter(torch.linspace(-3.0, 0.0, num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.switches = {
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": -5.0,
        }

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        """x [B, T, dim] -> q, k, v, g [B, T, H, D] (views of one projection) and beta [B, T, H]."""
        q, k, v, g = self.qkvg(x).unflatten(-1, (4, self.num_heads, self.head_dim)).unbind(2)
        return {"q": q, "k": k, "v": v, "g": g, "beta": self.beta(x), "A_log": self.A_log, "dt_bias": self.dt_bias}

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        o = nn.functional.rms_norm(o, (self.head_dim,)).flatten(-2)
        return self.out(o * torch.sigmoid(self.out_gate(x)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(mixed [B, T, dim], state after the last token [B, H, D, D])."""
        o, state = cula_kda(**self.inputs(x), **self.switches, safe_gate=True, output_final_state=True)
        return self.finish(x, o), state

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One token for each row, x [B, 1, dim]; `state` is updated in place."""
        o, _ = cula_decode(**self.inputs(x), **self.switches, state=state)
        return self.finish(x, o)


class Layer(nn.Module):
    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(dim), KdaMixer(dim, num_heads, head_dim)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, state = self.mixer(self.mixer_norm(x))
        x = x + mixed
        return x + self.mlp(x), state

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        x = x + self.mixer.step(self.mixer_norm(x), state)
        return x + self.mlp(x)


class TinyLM(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, dim: int = 128, num_layers: int = 2, num_heads: int = 4, head_dim: int = 32):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Layer(dim, num_heads, head_dim) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> (logits [B, T, 256], a state for each layer)."""
        x, states = self.embed(tokens), []
        for layer in self.layers:
            x, state = layer(x)
            states.append(state)
        return self.head(self.norm(x)), states

    def step(self, tokens: Tensor, states: list[Tensor]) -> Tensor:
        """One token a row, [B, 1] -> logits [B, 1, 256]; states are updated in place."""
        x = self.embed(tokens)
        for layer, state in zip(self.layers, states, strict=True):
            x = layer.step(x, state)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Continue a prompt: one prefill, then one decode step a byte."""
        device = self.embed.weight.device
        gen = torch.Generator(device).manual_seed(seed)
        logits, states = self(torch.tensor([list(prompt)], device=device))
        out = bytearray()
        for _ in range(length):
            weights = torch.softmax(logits[:, -1] / temperature, dim=-1)
            token = torch.multinomial(weights, 1, generator=gen)
            out.append(int(token))
            logits = self.step(token, states)
        return bytes(out)


def train(model: TinyLM, text: bytes, steps: int, length: int = 128, batch: int = 8) -> float:
    """Predict the next byte at random places of a text; returns the loss of the last step."""
    device = model.embed.weight.device
    data = torch.tensor(list(text), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        starts = torch.randint(len(data) - length, (batch,)).tolist()
        rows = torch.stack([data[i : i + length + 1] for i in starts])
        logits, _ = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step + 1 == steps:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    return loss.item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of training (default: %(default)s)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn (default: this file)")
    parser.add_argument("--prompt", default="def ", help="what to continue (default: %(default)r)")
    parser.add_argument("--length", type=int, default=120, help="bytes to generate (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = TinyLM().to(args.device)
    train(model, args.text.read_bytes(), args.steps)
    print(args.prompt + model.generate(args.prompt.encode(), args.length).decode(errors="replace"))


if __name__ == "__main__":
    main()
