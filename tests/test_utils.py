# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from cula import utils
from cula.core import checks
from cula.kda import chunk_kda


def test_a_cpu_has_no_compute_capability():
    with pytest.raises(RuntimeError, match="cpu is not a CUDA device"):
        utils.get_device_sm_version("cpu")
    assert not utils.is_hopper("cpu")
    assert not utils.is_blackwell("cpu")
    with pytest.raises(RuntimeError, match="Hopper"):
        utils.assert_hopper("cpu")
    with pytest.raises(RuntimeError, match="Blackwell"):
        utils.assert_blackwell("cpu")
    assert utils.describe_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("sm", "hopper", "blackwell"),
    [((9, 0), True, False), ((10, 0), False, True), ((10, 3), False, True), ((12, 0), False, False)],
)
def test_architectures_by_compute_capability(monkeypatch, sm, hopper, blackwell):
    monkeypatch.setattr(checks, "_capability_of", lambda index: sm)
    device = torch.device("cuda:0")
    assert utils.get_device_sm_version(device) == sm
    assert utils.is_hopper(device) is hopper
    assert utils.is_blackwell(device) is blackwell


def test_the_modular_path_where_nothing_is_fused():
    assert utils.get_kda_fused_fwd("cpu") is chunk_kda
