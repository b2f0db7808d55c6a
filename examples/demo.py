# SPDX-License-Identifier: Apache-2.0
"""cuLA's main job in three minutes: prefill, decode, train, sample. Every step is checked against the float64 definition.

    python examples/demo.py                        # or: make demo
    python examples/demo.py --train-seconds 5      # quicker

Runs on whatever is there: a CPU works, a GPU is faster. Writes the loss curve to demo_out/loss.png.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tiny_lm import TinyLM
from torch import Tensor

import cula
from cula import reference
from cula.reference import relative_error
from cula.utils import describe_device

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MODEL_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}  # of the float32 model: GPUs multiply float32 in tf32


@dataclass
class Row:
    """One line of the closing table."""

    step: str
    backend: str
    tokens: int
    seconds: float
    error: float
    tolerance: float


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--train-seconds", type=float, default=60.0)
    arguments.add_argument("--prompt-tokens", type=int, default=4096)
    arguments.add_argument("--out", type=Path, default=Path("demo_out"))
    args = arguments.parse_args()
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    console.print(f"[bold]cuLA {cula.__version__}[/bold] on {describe_device(device)}, torch {torch.__version__}")

    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        rows = prefill_and_decode(device, dtype, args.prompt_tokens, progress)
        model, text, losses, training_row = train(device, args.train_seconds, progress)
        rows.append(training_row)
        sample, sampling_row = generate(model, text, progress)
        rows.append(sampling_row)

    console.print(results(rows, device, dtype))
    console.print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte in {len(losses)} steps: {plot(losses, args.out)}")
    console.print("\n[bold]a sample[/bold] (the model has read this repository for a minute)")
    console.print(sample.decode("utf-8", errors="replace"), markup=False, highlight=False, style="cyan")
    worst = [r for r in rows if not r.error < r.tolerance]
    if worst:
        raise SystemExit(f"off the reference: {', '.join(f'{r.step} by {r.error:.1e}' for r in worst)}")


def prefill_and_decode(device: torch.device, dtype: torch.dtype, T: int, progress: Progress) -> list[Row]:
    """A long prompt through KDA and Lightning, then 32 tokens one by one from the state it left."""
    H, D, steps = 4, 64, 32
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, dtype)

    total = T + steps
    q, k, v, g = (normal(1, total, H, D) for _ in range(4))
    beta, decay = normal(1, total, H), torch.tensor([0.001, 0.01, 0.1, 1.0], device=device)
    A_log, dt_bias = torch.zeros(H, device=device), torch.zeros(H, D, device=device)
    gates = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0, "use_gate_in_kernel": True}
    switches = {**gates, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    families = {
        "KDA": (
            lambda s: cula.cula_kda(
                q[:, s], k[:, s], v[:, s], g[:, s], beta[:, s], **switches, safe_gate=True, output_final_state=True
            ),
            lambda s, state: cula.cula_decode(q[:, s], k[:, s], v[:, s], state, g=g[:, s], beta=beta[:, s], **switches),
            lambda: reference.kda(q, k, v, g, beta, **switches),
            cula.explain("kda", q, k, v, g, beta, **switches, safe_gate=True),
        ),
        "Lightning": (
            lambda s: cula.cula_lightning(q[:, s], k[:, s], v[:, s], decay, output_final_state=True),
            lambda s, state: cula.cula_decode(q[:, s], k[:, s], v[:, s], state, mode="lightning", decay=decay),
            lambda: reference.lightning(q, k, v, decay),
            cula.explain("lightning", q, k, v, decay),
        ),
    }
    rows = []
    token, state = slice(0, 1), torch.zeros(1, H, D, D, device=device)
    decode_choice = cula.explain("decode", q[:, token], k[:, token], v[:, token], state, mode="lightning", decay=decay)
    for name, (prefill, decode, definition, choice) in families.items():
        progress.console.print(str(choice), highlight=False, markup=False)
        task = progress.add_task(f"{name}: prefill and decode", total=steps + 2)
        prompt = slice(0, T)
        prefill(prompt)  # warm up: a GPU compiles here
        (o, state), seconds = timed(lambda prefill=prefill, prompt=prompt: prefill(prompt), device)
        progress.advance(task)
        want_o, want_state = definition()
        progress.advance(task)
        rows.append(Row(f"{name} prefill", choice.name, T, seconds, relative_error(o, want_o[:, :T]), TOLERANCE[dtype]))
        outputs, seconds = [], 0.0
        for t in range(T, total):
            (o_t, _), spent = timed(lambda decode=decode, t=t, state=state: decode(slice(t, t + 1), state), device)
            outputs.append(o_t)
            seconds += spent
            progress.advance(task)
        error = max(relative_error(torch.cat(outputs, 1), want_o[:, T:]), relative_error(state, want_state))
        rows.append(Row(f"{name} decode", decode_choice.name, steps, seconds, error, TOLERANCE[dtype]))
    return rows


def train(device: torch.device, seconds: float, progress: Progress) -> tuple[TinyLM, bytes, list[float], Row]:
    """A two-layer KDA language model on the text of this repository."""
    text = repository_text()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = TinyLM().to(device)
    error = gradient_error(model, data[:96].view(1, -1).to(device))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    gen = torch.Generator().manual_seed(0)
    B, T, losses = 8, 256, []
    task = progress.add_task("training a two-layer KDA model", total=round(seconds))
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or len(losses) < 2:
        rate = 3e-3 * min(1.0, (len(losses) + 1) / 20) * max(0.05, 1 - spent / seconds)
        for group in optimiser.param_groups:
            group["lr"] = rate
        first = torch.randint(0, len(data) - T - 1, (B, 1), generator=gen)
        batch = data[first + torch.arange(T + 1)].to(device)  # [B, T + 1]
        logits, _ = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        progress.update(task, completed=min(round(seconds), round(time.perf_counter() - start)))
    spent = time.perf_counter() - start
    row = Row(
        "training (forward + backward)",
        backend_of(model, device),
        len(losses) * B * T,
        spent,
        error,
        MODEL_TOLERANCE[device.type],
    )
    return model, text, losses, row


def gradient_error(model: TinyLM, tokens: Tensor) -> float:
    """The first layer's KDA call: worst relative error of its gradients against autograd through the definition."""
    mixer, norm = model.layers[0].mixer, model.layers[0].mixer_norm
    inputs = {n: t.detach().requires_grad_() for n, t in mixer.inputs(norm(model.embed(tokens))).items()}
    leaves = list(inputs.values())
    o, _ = cula.cula_kda(**inputs, **mixer.switches, safe_gate=True)
    want, _ = reference.kda(**inputs, **mixer.switches)
    direction = torch.randn_like(o)
    got = torch.autograd.grad((o * direction).sum(), leaves)
    wanted = torch.autograd.grad((want * direction).sum(), leaves)
    return max(relative_error(a, b) for a, b in zip(got, wanted, strict=True))


def backend_of(model: TinyLM, device: torch.device) -> str:
    mixer = model.layers[0].mixer
    inputs = mixer.inputs(torch.zeros(1, 8, mixer.qkvg.in_features, device=device))
    return cula.explain("kda", **inputs, **mixer.switches, safe_gate=True).name


def generate(model: TinyLM, text: bytes, progress: Progress) -> tuple[bytes, Row]:
    """Sample from the model; check its step-by-step logits against one pass over the whole text."""
    prompt, length = text[:64], 300
    task = progress.add_task("sampling", total=1)
    start = time.perf_counter()
    sample = model.generate(prompt, length)
    seconds = time.perf_counter() - start
    progress.advance(task)
    device = model.embed.weight.device
    tokens = torch.tensor([list(prompt + sample[:64])], device=device)
    with torch.no_grad():
        whole, _ = model(tokens)
        logits, states = model(tokens[:, :64])
        steps = [model.step(tokens[:, t : t + 1], states) for t in range(64, tokens.shape[1])]
    error = relative_error(torch.cat([logits, *steps], 1), whole)
    return prompt + sample, Row(
        "sampling (decode)", backend_of(model, device), length, seconds, error, MODEL_TOLERANCE[device.type]
    )


def repository_text() -> bytes:
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("cula/**/*.py")])
    return b"\n\n".join(f.read_bytes() for f in files)


def timed(call, device: torch.device):
    """(result, seconds) of a call, waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def results(rows: list[Row], device: torch.device, dtype: torch.dtype) -> Table:
    table = Table(title=f"{describe_device(device)}, prefill and decode in {str(dtype).removeprefix('torch.')}")
    for name, justify in (
        ("step", "left"),
        ("backend", "left"),
        ("tokens/s", "right"),
        ("relative error", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for r in rows:
        verdict = "[green]ok[/green]" if r.error < r.tolerance else "[red]OFF[/red]"
        table.add_row(r.step, r.backend, f"{r.tokens / r.seconds:,.0f}", f"{r.error:.1e} < {r.tolerance:.0e}", verdict)
    return table


def plot(losses: list[float], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, lw=1.2)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="A two-layer KDA model learning this repository")
    axes.grid(alpha=0.3)
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
