#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run flash-linear-attention's own tests on cuLA, with nothing changed but their imports.

    git clone https://github.com/fla-org/flash-linear-attention FLA
    python tools/fla_tests.py FLA                        # on a machine with a GPU; fla-core is installed
    python tools/fla_tests.py FLA -n 14                  # whatever follows the folder goes to pytest
    python tools/fla_tests.py FLA --fla-of-checkout      # references from that checkout, not from the installed fla-core

Its test files are copied to a temporary folder, where the functions under test are imported from `cula.kda`, `cula.gdn` and
`cula.lightning` under the same names. The references that the tests compare with stay FLA's. FLA's conftest comes along, which
fills uninitialised memory with NaN. Nothing of FLA is kept.

| file                     | functions that are cuLA's                                      |
|--------------------------|----------------------------------------------------------------|
| `test_kda.py`            | `chunk_kda`, `fused_recurrent_kda`                             |
| `test_gdn.py`            | `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule`   |
| `test_lightning_attn.py` | `chunk_lightning_attn`                                         |
| `test_simple_gla.py`     | `chunk_simple_gla`, `fused_recurrent_simple_gla`               |
| `test_retention.py`      | `chunk_simple_gla(g_gamma=)`, which FLA's `chunk_retention` calls |

What is left out, and why, is in `LEFT_OUT` below and printed before the run. The last line counts what passed.

FLA (August 2026) tests `g_gamma` only by way of retention: every case of `test_simple_gla.py` has decays that depend on data.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Of each file: what is imported, and what comes in its place.
IMPORTS = {
    "test_kda.py": {"from fla.ops.kda import chunk_kda,": "from cula.kda import chunk_kda,"},
    "test_gdn.py": {
        "from fla.ops.gated_delta_rule import chunk_gated_delta_rule,": "from cula.gdn import chunk_gated_delta_rule,"
    },
    "test_lightning_attn.py": {
        "from fla.ops.lightning_attn import chunk_lightning_attn,": (
            "from cula.lightning import chunk_lightning_attn\nfrom fla.ops.lightning_attn import"
        )
    },
    "test_simple_gla.py": {
        "from fla.ops.simple_gla.chunk import": "from cula.lightning import",
        "from fla.ops.simple_gla.fused_recurrent import": "from cula.lightning import",
    },
    "test_retention.py": {
        "from fla.ops.retention import chunk_retention,": (
            "import importlib\n\nimport cula.lightning\n\n"
            'importlib.import_module("fla.ops.retention.chunk").chunk_simple_gla = cula.lightning.chunk_simple_gla\n'
            "from fla.ops.retention import chunk_retention,"
        )
    },
}

NOT_OURS = "calls functions of FLA's alone"
DATA_DEPENDENT = "decays that depend on data (g=), which Lightning Attention does not have; cuLA takes g_gamma="
ELSEWHERE = "needs hardware or a package of others"
# Tests that say nothing of cuLA, and why.
LEFT_OUT = {
    "test_kda.py": {
        "test_naive_chunk": NOT_OURS,
        "test_gate": NOT_OURS,
        "test_fused_recurrent_vllm_decode": NOT_OURS,
        "test_flash_kda_chunk": f"FlashKDA: {ELSEWHERE}",
        "test_flash_kda_chunk_varlen": f"FlashKDA: {ELSEWHERE}",
        "test_triton_ascend_backend_routing": f"Ascend: {ELSEWHERE}",
    },
    "test_gdn.py": {
        "test_chunk_gated_delta_rule_fwd_h_blackwell_triton_guard": NOT_OURS,
        "test_gate": NOT_OURS,
        "test_prepare_wy_repr_bwd_no_g": NOT_OURS,
        "test_flash_qla_chunk": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_chunk_varlen": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_chunk_state_v_first": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_verifier_rejects": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_verifier_sm120_accepts_forward": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_verifier_sm120_rejects_backward": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_verifier_sm120_rejects_float16": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_sm120_flag_is_exact_capability": f"FlashQLA: {ELSEWHERE}",
        "test_flash_qla_chunk_forward_only": f"FlashQLA: {ELSEWHERE}",
    },
    "test_lightning_attn.py": {},
    "test_simple_gla.py": {
        "test_fused_recurrent": DATA_DEPENDENT,
        "test_fused_recurrent_state_v_first": DATA_DEPENDENT,
        "test_fused_recurrent_varlen": DATA_DEPENDENT,
        "test_chunk": DATA_DEPENDENT,
        "test_chunk_with_chunk_size": DATA_DEPENDENT,
        "test_chunk_state_v_first": DATA_DEPENDENT,
        "test_chunk_varlen": DATA_DEPENDENT,
        "test_fused_chunk": DATA_DEPENDENT,
        "test_fused_chunk_varlen": DATA_DEPENDENT,
        "test_parallel": NOT_OURS,
        "test_parallel_varlen": NOT_OURS,
        "test_simple_gla_to_mamba2": f"Mamba 2: {ELSEWHERE}",
    },
    "test_retention.py": {
        "test_fused_chunk": NOT_OURS,
        "test_fused_chunk_varlen": NOT_OURS,
        "test_parallel": NOT_OURS,
        "test_fused_recurrent_state_v_first": NOT_OURS,
    },
}


def rewritten(name: str, text: str) -> str:
    """A test file with its imports replaced."""
    for old, new in IMPORTS[name].items():
        if text.count(old) != 1:
            raise SystemExit(f"{name} does not have {old!r} once: FLA has changed, and this script has not")
        text = text.replace(old, new)
    return text


def copy_tests(checkout: Path, folder: Path) -> list[str]:
    """Copies of the tests in `folder`, as FLA names its own; returns what pytest is to leave out."""
    left_out = []
    (folder / "tests/ops").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests/conftest.py").write_text((checkout / "tests/conftest.py").read_text())
    for name in IMPORTS:
        text = (checkout / "tests/ops" / name).read_text()
        (folder / "tests/ops" / name).write_text(rewritten(name, text))
        tests = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
        for test, reason in LEFT_OUT[name].items():
            if test not in tests:
                raise SystemExit(f"{name} has no {test}: FLA has changed, and this script has not")
            print(f"left out: {name} {test}: {reason}")
            left_out.append(f"tests/ops/{name}::{test}")
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description="Run FLA's own tests on cuLA.", epilog="Other arguments go to pytest.")
    parser.add_argument("checkout", type=Path, help="folder of a clone of flash-linear-attention")
    parser.add_argument("--fla-of-checkout", action="store_true", help="import `fla` from there, not the installed one")
    args, for_pytest = parser.parse_known_args()
    first = [str(ROOT)] + ([str(args.checkout.resolve())] if args.fla_of_checkout else [])
    # Of grouped value heads, FLA tests its own kernels only where no other library's could be asked.
    environment = os.environ | {
        "FLA_DISABLE_BACKEND_DISPATCH": "1",
        "PYTHONPATH": os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with tempfile.TemporaryDirectory(prefix="fla-tests-") as folder:
        left_out = copy_tests(args.checkout, Path(folder))
        (Path(folder) / "conftest.py").write_text(CONFTEST.format(left_out=left_out))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", *for_pytest]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


CONFTEST = """
LEFT_OUT = {left_out!r}


def pytest_collection_modifyitems(config, items):
    gone = [item for item in items if item.nodeid.split("[")[0] in LEFT_OUT]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]
"""


if __name__ == "__main__":
    sys.exit(main())
