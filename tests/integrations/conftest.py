# SPDX-License-Identifier: Apache-2.0
"""Small models: more threads than one cost more than they bring."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
