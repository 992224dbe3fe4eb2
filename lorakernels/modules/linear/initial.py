# SPDX-License-Identifier: Apache-2.0
"""OLoRA and PiSSA: an adapter that starts from the base weight, which then lacks it.

W [N, K] is the weight as it comes, s the scaling, R the rank. The layer holds W′ = W − s · B0 A0, so W′ + s · B A = W
at first. The products are PEFT's (peft/tuners/lora/layer.py, 0.21.2):

* "olora" (arXiv 2406.01775): W = Q U, a QR decomposition. B0 = Q[:, :R], A0 = U[:R].
* "pissa" (arXiv 2404.02948): W = V diag(S) Uᵀ, its singular values. B0 = V[:, :R] √(S[:R] / s), and
  A0 = √(S[:R] / s) Uᵀ[:R].
* "pissa_niter_N": as "pissa", with N subspace iterations of `torch.svd_lowrank`, which draws from torch's generator.

The file of such an adapter is a plain one of rank 2 R over W: A of the file is [A; A0], its B is [B, −B0].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.config import LoRAConfig

NAMES = ("lora_A_init", "lora_B_init")  # buffers of a layer that has an initial adapter
_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


class Initial(NamedTuple):
    """An initial adapter and the rest of the weight.

    Attributes:
        A, B: [R, K] and [N, R] in the adapter's dtype.
        scaling: s.
        rest: fp32 [N, K], W − s · B A with A and B as they are rounded to their dtype.
    """

    A: Tensor
    B: Tensor
    scaling: float
    rest: Tensor


def check_initial(path: str, weight: Tensor, config: LoRAConfig) -> None:
    """Refuse a weight [N, K] from which `config` cannot start an adapter.

    Raises:
        TypeError: it is not float32, bfloat16 or float16; FP8 has lost the values that the initialisation reads.
        ValueError: the rank is larger than N or K, or the weight is not finite.
    """
    if not config.changes_base:
        return
    what, r = f"init_lora_weights={config.init_lora_weights!r}", config.rank_for(path)
    if weight.dtype not in _TAKEN:
        raise TypeError(
            f"{what} starts from the weight of {path} in float32, bfloat16 or float16, found {weight.dtype}: load the "
            "model in 16 bits and call apply_lora, which then holds the rest in FP8"
        )
    if r > min(weight.shape):
        raise ValueError(
            f"{what} needs a rank of at most {min(weight.shape)} for {path}.weight {list(weight.shape)}, found r={r}"
        )
    if not (weight.is_meta or bool(weight.detach().isfinite().all())):
        raise ValueError(f"{what} needs a finite weight, found inf or NaN in {path}.weight")


@torch.no_grad()
def initial_adapter(
    path: str, weight: Tensor, config: LoRAConfig, dtype: torch.dtype | None
) -> Initial:
    """The initial adapter of the layer at `path` in `dtype` (None: the weight's), and the rest of `weight`.

    On the meta device nothing is computed: the tensors have shapes only.

    Raises:
        TypeError, ValueError: as `check_initial`.
    """
    check_initial(path, weight, config)
    r, scaling = config.rank_for(path), config.scaling_for(path)
    full = weight.detach().float()
    if weight.is_meta:
        a, b = full.new_empty(r, full.shape[1]), full.new_empty(full.shape[0], r)
    elif config.init_lora_weights == "olora":
        a, b = _olora(full, r)
    else:
        a, b = _pissa(full, r, scaling, str(config.init_lora_weights))
    a, b = (part.to(dtype or weight.dtype).contiguous() for part in (a, b))
    return Initial(a, b, scaling, full - scaling * (b.float() @ a.float()))


def _olora(weight: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The first R columns of Q depend on the first R columns of W alone, and U[:R] = Q[:, :R]ᵀ W."""
    q = torch.linalg.qr(weight[:, :r]).Q
    return q.T @ weight, q


def _pissa(weight: Tensor, r: int, scaling: float, how: str) -> tuple[Tensor, Tensor]:
    if how == "pissa":
        v, s, ut = torch.linalg.svd(weight, full_matrices=False)
    else:
        v, s, u = torch.svd_lowrank(weight, r, niter=int(how.rpartition("_")[2]))
        ut = u.T
    root = (s[:r] / scaling).sqrt()
    return root[:, None] * ut[:r], v[:, :r] * root


def initial_of(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(A0 [R, K], B0 [N, R]) of a layer with a weight that lacks s · B0 A0; else None."""
    a, b = map(layer._buffers.get, NAMES)
    return None if a is None or b is None else (a, b)
