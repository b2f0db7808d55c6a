# SPDX-License-Identifier: Apache-2.0
"""What the simulator's README says runs, runs; what it quotes and links to is there."""

import re
from pathlib import Path

import pytest

from cula.ops.cute.toolchain import build
from tools import ptx

FOLDER = Path(ptx.__file__).parent
README = (FOLDER / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_the_example_runs_as_pasted_and_each_mutation_is_noticed():
    namespace: dict = {}
    blocks = [block for block in BLOCKS if "tools.ptx" in block]
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    for what in namespace["BROKEN"]:
        namespace["test_a_missing_wait_is_noticed"](what)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_the_first_barrier_of_the_example_shows_in_two_orders():
    import torch

    broken = ptx.compiled("reverse", modules=("tools.ptx.example.reverse",))
    broken = broken.edited(ptx=ptx.mutate.without(ptx.mutate.BLOCK_BARRIER, 0))
    x = torch.randn(4, 128)
    ptx.simulate(broken, x, torch.empty_like(x), races=True)
    for order in ("first", "last"):
        with pytest.raises(ptx.SimulationError, match="no mbarrier at"):
            ptx.simulate(broken, x, torch.empty_like(x), order=order)


def test_the_kernel_is_quoted_as_it_is():
    quoted = next(block for block in BLOCKS if "cute.arch" in block)
    assert quoted in (FOLDER / "example" / "reverse.py").read_text()


def test_a_rule_is_as_it_is_shown():
    """The new instruction of the README, added as it says."""
    from tools.ptx import translate
    from tools.ptx.program import Program

    rule = next(block for block in BLOCKS if "def brev" in block)
    namespace = {"unsupported": translate.unsupported}
    exec(compile(rule, "README.md", "exec"), namespace)
    program = Program(".entry k( )\n.reqntid 32\n{ brev.b32 %r1, %r2; ret; }")
    to, source = (program.reference(name, "U") for name in ("%r1", "%r2"))
    assert namespace["brev"](program.reference, program, program.code[0]) == f"reverse_bits({source},{to})"


def test_every_order_is_explained():
    assert re.findall(r"^\| `(\w+)` \| (?:when|at) ", README, re.MULTILINE) == list(ptx.ORDERS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (FOLDER / target).exists(), target


def test_modules_are_listed_in_the_package():
    listed = "".join(re.findall(r"^\| (`.*?) \|", str(ptx.__doc__), re.MULTILINE))
    for module in FOLDER.glob("*.py"):
        name = module.stem
        assert name == "__init__" or f"`{name}.py`" in listed or f"`_{name.removeprefix('host_')}`" in listed, name
