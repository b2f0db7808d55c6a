# SPDX-License-Identifier: Apache-2.0
"""The examples with other packages run, and check themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(name, *arguments):
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_hugging_face_models_give_the_same_tokens():
    pytest.importorskip("transformers")
    said = run("hf_generate.py", "--prompt", "80", "--new-tokens", "8")
    assert said.count("the same tokens") == 2 and "(0 calls)" not in said


@pytest.mark.slow
def test_a_model_of_fla_learns():
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
    said = run("train_fla_model.py", "--model", "gdn", "--steps", "6", "--tokens", "70")
    assert "'fla.chunk_gated_delta_rule': 12" in said and "'fla.fused_recurrent_gated_delta_rule_fwd': 128" in said
