# SPDX-License-Identifier: Apache-2.0
"""The ops without modules: one linear layer with an adapter, forward and backward, compared with float64 PyTorch.

Each op is torch.ops.lorakernels.*. It is PyTorch on a CPU and one kernel on a GPU; `lorakernels doctor` says which.
"""

from __future__ import annotations

import torch

from lorakernels import PhiloxState, ops
from lorakernels.numerics.dropout import drawn_mask, keep_scale
from lorakernels.ops import Dropout, Scaled, Scaling, Up, Weight

M, N, K, R, P, SCALING, SITE = 256, 512, 384, 16, 0.1, 2.0, 0
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def main() -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, dy = (torch.randn(M, n, device=device, dtype=torch.bfloat16) for n in (K, N))
    weight = torch.randn(N, K, device=device) / K**0.5
    lora_a, lora_b = torch.randn(R, K, device=device) / K**0.5, torch.randn(N, R, device=device)
    state = torch.zeros(
        2, 2, device=device
    )  # rows: amax, scale (0: by its own amax); columns: x, dy
    slot = PhiloxState(1, device).slot()  # 16 bytes from which the mask is drawn

    scale = 448.0 / weight.abs().max()
    w8, w_inv = (weight * scale).to(E4M3).view(torch.uint8), (1 / scale).view(1)
    weight8 = Weight(w8, w_inv)
    dropout = Dropout(slot, P, SITE)
    x8, x_inv, s = ops.quantize_lora_down(x, lora_a, Scaling(state, 0, True), dropout)
    up = Up(lora_b, s, SCALING)
    y = ops.fp8_linear_lora(Scaled(x8, x_inv), weight8, None, up, torch.bfloat16)
    dy8, dy_inv, ds, db, _ = ops.quantize_grad(dy, up, Scaling(state, 1, True), E5M2)
    scaled_dy = Scaled(dy8, dy_inv)
    dx = ops.fp8_grad_input(scaled_dy, E5M2, weight8, ds, lora_a, dropout, torch.bfloat16)
    da = ops.lora_grad_a(ds, Scaled(x8, x_inv), dropout, torch.float32)

    keep = drawn_mask(dropout, M, K) * keep_scale(P)
    leaves = [t.double().requires_grad_() for t in (x, lora_a, lora_b)]
    exact = leaves[0] @ weight.double().t()
    exact = exact + SCALING * ((leaves[0] * keep) @ leaves[1].t()) @ leaves[2].t()
    expected = dict(
        zip(("dx", "dA", "dB"), torch.autograd.grad(exact, leaves, dy.double()), strict=True)
    )
    found = {"y": y, "dx": dx, "dA": da, "dB": db}
    expected["y"] = exact.detach()
    errors = {
        name: float((t.double() - expected[name]).norm() / expected[name].norm())
        for name, t in found.items()
    }
    print(f"relative errors on {device}, from FP8's 3 and 2 bits of mantissa:", errors)
    return errors


if __name__ == "__main__":
    main()
