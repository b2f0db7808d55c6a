# SPDX-License-Identifier: Apache-2.0
"""The fuzzer: finds nothing where nothing is wrong, and finds what is broken on purpose; its line makes the same call again."""

import shlex
import subprocess
import sys

import pytest
import torch

from cula.core import dispatch
from cula.core.family import FAMILIES
from cula.fuzz import run as fuzz
from cula.fuzz.draw import Draw, same_bits
from cula.fuzz.family import with_fuzz
from cula.ops.torch import kda as torch_kda


def test_every_family_is_fuzzed():
    assert with_fuzz() == [name for name, family in FAMILIES.items() if family.entry.startswith("cula.")]


def test_a_few_hundred_calls_are_right(capsys):
    assert fuzz.main(["--seed", "7", "--seconds", "600", "--calls", "300", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "300 calls, 0 wrong" in said
    for kind in ("prefill", "decode", "gradient", "bad input"):
        assert f"kda {kind}" in said
        assert f"lightning {kind}" in said


@pytest.mark.slow
def test_the_command_shares_calls_among_processes():
    command = [sys.executable, "-m", "cula.fuzz", "--jobs", "2", "--calls", "5", "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "10 calls, 0 wrong" in ran.stdout


def test_calls_of_one_kind_agree_in_what_a_kernel_is_compiled_for(monkeypatch):
    """On a GPU a variant's calls are of few kinds, so that few kernels are compiled for many calls."""
    monkeypatch.setitem(fuzz.CALLS_A_VARIANT, "cpu", 40)
    monkeypatch.setitem(fuzz.KINDS_A_VARIANT, "cpu", 4)
    plan = fuzz.Plan(seed=5, seconds=600.0, family=None, backend="auto", device="cpu")
    draws = [Draw(f"case {case}", torch.device("cpu"), plan.kind(case)) for case in range(80)]
    drawn = [(draw.switch("dtype", range(1000)), draw.chance_of("packed", 0.5)) for draw in draws]
    assert len(set(drawn[:40])) == 4 and len(set(drawn)) == 8  # two variants, four kinds each
    assert drawn[0] == drawn[4] != drawn[1]
    assert len({draw.integer(0, 10**6) for draw in draws}) == 80  # and they differ in the rest


def off_by_a_head(problem, x, out=None, *, right=torch_kda.kda_fwd):
    """One head of one token is a little wrong."""
    made = right(problem, x) if out is None else right(problem, x, out)
    if made.o.numel():
        made.o.select(2, 0)[:, -1] *= 1.5
    return made


def changes_its_input(problem, x, out=None, *, right=torch_kda.kda_fwd):
    made = right(problem, x) if out is None else right(problem, x, out)
    x.v.data.view(-1)[:1] += 1 if x.v.is_contiguous() and x.v.numel() else 0
    return made


def writes_around_o(problem, x, out=None, *, right=torch_kda.kda_fwd):
    made = right(problem, x) if out is None else right(problem, x, out)
    if out is not None:
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()
    return made


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(off_by_a_head, "on torch: o "), (changes_its_input, "v was changed"), (writes_around_o, "memory around out was written")],
)
def test_a_broken_kernel_is_found(monkeypatch, capsys, broken, sentence):
    monkeypatch.setattr(torch_kda, "kda_fwd", broken)
    dispatch._find.cache_clear()
    assert fuzz.main(["--seed", "3", "--seconds", "600", "--calls", "120", "--family", "kda", "--device", "cpu"]) == 1
    said = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(said) if sentence in line)
    command = shlex.split(said[first + 2])
    assert command[:3] == ["python", "-m", "cula.fuzz"]
    assert fuzz.main(command[3:]) == 1
    assert said[first] in capsys.readouterr().out
    monkeypatch.undo()
    dispatch._find.cache_clear()
    assert fuzz.main(command[3:]) == 0


def test_a_decode_that_touches_another_slot_is_found(monkeypatch, capsys):
    right = torch_kda.kda_decode

    def writes_slot_0(problem, x):
        made = right(problem, x)
        x.state[0, 0, 0, 0] = 1.0
        return made

    monkeypatch.setattr(torch_kda, "kda_decode", writes_slot_0)
    dispatch._find.cache_clear()
    try:
        assert fuzz.main(["--seed", "3", "--seconds", "600", "--calls", "300", "--family", "kda", "--device", "cpu"]) == 1
    finally:
        monkeypatch.undo()
        dispatch._find.cache_clear()
    assert "slot 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "words"), [("--device=gpu", "torch knows no such device"), ("--jobs=0", "expected 1 or more")]
)
def test_a_bad_option_is_a_sentence(option, words, capsys):
    with pytest.raises(SystemExit):
        fuzz.main([option, "--seconds=0"])
    assert words in capsys.readouterr().err


def test_a_backend_that_takes_no_call_is_no_success(capsys):
    if torch.cuda.is_available():
        pytest.skip("it takes calls here")
    assert fuzz.main(["--backend", "cute_sm90", "--calls", "30"]) == 2
    assert "no call was made: cute_sm90 serves none on cpu" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_a_sentence(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        fuzz.main(["--device", "cuda"])
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


def test_poison_is_around_every_tensor():
    draw = Draw("a seed", torch.device("cpu"))
    t = draw.place("t", draw.normal(2, 5, 3, 8), torch.bfloat16)
    buffer = draw.buffers["t"]
    assert same_bits(buffer.original(), t)
    assert int(buffer.memory.isfinite().sum()) == t.numel()
    t.zero_()
    assert buffer.outside_is_untouched()
    assert not buffer.is_untouched()
    buffer.memory[0] = 0
    assert not buffer.outside_is_untouched()


@pytest.mark.slow
def test_a_process_that_dies_is_wrong():
    plan = fuzz.Plan(seed=0, seconds=60.0, family=None, backend="auto", device="vulkan")  # of which torch has no random numbers
    (outcome,) = fuzz.together([plan])
    assert outcome.wrong == "its process ended with status 1" and "--case 0 " in outcome.command


def test_a_process_that_does_not_come_back_is_wrong(monkeypatch):
    monkeypatch.setattr(fuzz, "PATIENCE", 0.0)
    (outcome,) = fuzz.together([fuzz.Plan(seed=0, seconds=0.0, family=None, backend="auto", device="cpu")])
    assert outcome.wrong == "not back 0 s after the time was over"
