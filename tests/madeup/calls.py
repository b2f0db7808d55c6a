# SPDX-License-Identifier: Apache-2.0
import torch


def tensors(T=20, B=2, H=1, HV=2, K=16, V=8):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, h, d, generator=gen) for h, d in ((H, K), (H, K), (HV, V)))
    return {"q": q, "k": k, "v": v, "rate": torch.rand(B, T, HV, generator=gen)}
