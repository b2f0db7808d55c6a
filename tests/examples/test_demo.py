# SPDX-License-Identifier: Apache-2.0
"""The main job runs, checks itself and leaves its picture."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from tiny_lm import TinyLM  # noqa: E402


@pytest.mark.slow
def test_demo_runs_and_every_step_is_ok(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--train-seconds", "2", "--prompt-tokens", "300"]
    run = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "OFF" not in run.stdout
    for step in ("KDA prefill", "KDA decode", "Lightning prefill", "Lightning decode", "training", "sampling"):
        assert step in run.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_generation_by_steps_is_one_pass_over_the_text():
    torch.manual_seed(0)
    model = TinyLM(dim=32, num_layers=2, num_heads=2, head_dim=16)
    tokens = torch.randint(0, 256, (2, 90))
    with torch.no_grad():
        whole, _ = model(tokens)
        logits, states = model(tokens[:, :70])
        steps = [model.step(tokens[:, t : t + 1], states) for t in range(70, 90)]
    torch.testing.assert_close(torch.cat([logits, *steps], 1), whole, rtol=1e-4, atol=1e-5)


def test_the_model_compiles_whole():
    torch._dynamo.reset()
    model = TinyLM(dim=32, num_layers=1, num_heads=2, head_dim=16)
    compiled = torch.compile(lambda t: model(t)[0], fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 256, (1, 40))
    torch.testing.assert_close(compiled(tokens), model(tokens)[0])
