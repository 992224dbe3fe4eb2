# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by Transformer Engine: a Llama of te.TransformerLayer in FP8, with LoRA beside q, k, v and o.

Rows are split between layers, and the head's vocabulary and its loss over ranks (te.parallel_cross_entropy). The rest
is as in te_layers.py: DelayedScaling, a frozen base that is cast once, one A and one B for q, k and v. An adapter
exchanges rows of s, R wide, which is the least that a user of TE can send.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import Spec, dtype_of, value
from benchmarks.peers.te import autocast, te_or_unavailable
from benchmarks.peers.te_layers import LLAMA, Adapter, WithAdapter
from benchmarks.peers.training import IGNORE, P, Training, fill_adapters

# The gathers of x and dy, and the sums of y and dx, run beside products. Nothing of a frozen weight's gradient does.
OVERLAP = {
    "ub_tp_comm_overlap": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
}
RING = {"method": "ring_exchange"}


def gather_rows(group: Any, rows: Tensor) -> Tensor:
    """All ranks' rows, of dimension 0."""
    found: Tensor = all_gather_tensor_autograd(rows, 0, group)
    return found


def sum_rows(group: Any, rows: Tensor) -> Tensor:
    """This rank's rows of the sum over all ranks."""
    found: Tensor = reduce_scatter_tensor_autograd(rows, "sum", 0, group)
    return found


def sum_gradients(trained: list[nn.Parameter], group: Any) -> None:
    """Over the ranks of `group`, by one all-reduce."""
    grads = [p.grad for p in trained if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=group)
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [x.view_as(g) for x, g in zip(parts, grads, strict=True)])


class TeTensor(Training):
    """Over the ranks of `mesh`, of one dimension; `overlap` by TE's user buffers.

    `replicated` are the adapters that all ranks have whole, whose gradients are of each rank's own rows.
    """

    fp8 = True
    warmup_steps = 3  # a weight's scale comes from the amax of the casts before

    def __init__(
        self, spec: Spec, adapted: str, device: torch.device, mesh: Any, overlap: bool = False
    ) -> None:
        self.te = te_or_unavailable()
        if device.type != "cuda":
            raise Unavailable("needs a GPU")
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.overlap, self.casts = overlap, 0
        self.replicated: list[nn.Parameter] = []
        super().__init__(spec, adapted, device)

    def build(self) -> nn.Module:
        te, shape = self.te, self.spec.shape
        tokens, width = self.spec.length * self.spec.batch, shape["hidden_size"]
        torch.manual_seed(self.rank)  # ranks drop elements of their own rows
        if self.overlap:
            start_user_buffers(te, [tokens, width], self.ranks)
        model = nn.Module()
        model.layers = nn.ModuleList(map(self._layer, range(shape["num_hidden_layers"])))
        common = {"params_dtype": dtype_of(self.device), "device": self.device}
        split = {"tp_group": self.group, "sequence_parallel": True, "parallel_mode": "column"}
        model.norm = te.RMSNorm(width, eps=1e-5, sequence_parallel=True, **common)
        model.head = te.Linear(width, shape["vocab_size"], bias=False, **split, **common)
        with torch.no_grad():
            model.head.weight.copy_(self._part("lm_head.weight", model.head.weight, 0))
        model.norm.requires_grad_(False)
        model.head.requires_grad_(False)
        whole = (shape["vocab_size"], width)
        embedding = value("model.embed_tokens.weight", whole, self.device, dtype_of(self.device))
        model.register_buffer("embedding", embedding)
        head_dim = width // shape["num_attention_heads"]
        rotary = te.RotaryPositionEmbedding(head_dim, rotary_base=shape["rope_theta"])
        model.register_buffer("angles", rotary(self.spec.length).to(self.device))
        return model

    def _part(self, name: str, like: Tensor, dim: int, fused: int = 1) -> Tensor:
        """This rank's part along `dim` of the weight of that name; `like` holds `fused` such parts one on another."""
        whole = [*like.shape]
        whole[0] //= fused
        whole[dim] *= self.ranks
        found = value(name, tuple(whole), self.device, like.dtype)
        return found.chunk(self.ranks, dim)[self.rank]

    def _layer(self, number: int) -> nn.Module:
        shape, dtype = self.spec.shape, dtype_of(self.device)
        layer = self.te.TransformerLayer(
            shape["hidden_size"],
            shape["intermediate_size"],
            shape["num_attention_heads"],
            num_gqa_groups=shape["num_key_value_heads"],
            layernorm_epsilon=1e-5,
            **LLAMA,
            params_dtype=dtype,
            set_parallel_mode=True,
            sequence_parallel=True,
            tp_group=self.group,
            device=self.device,
            **(OVERLAP if self.overlap else {}),
        )
        layer.requires_grad_(False)
        self._load(layer, f"model.layers.{number}")
        self._adapt(layer.self_attention, f"model.layers.{number}.self_attn")
        return layer

    @torch.no_grad()
    def _load(self, layer: Any, path: str) -> None:
        """q, k and v are one weight, gate and up another: this rank's rows of each, one below the other."""
        shape, attention, mlp = self.spec.shape, layer.self_attention, layer.layernorm_mlp
        width, ffn = shape["hidden_size"], shape["intermediate_size"]
        kv = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
        rows = {"self_attn.q_proj": width, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        for fused, parts in (
            (attention.layernorm_qkv.weight, rows),
            (mlp.fc1_weight, {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}),
        ):
            own = [n // self.ranks for n in parts.values()]
            for part, name in zip(fused.split(own), parts, strict=True):
                part.copy_(self._part(f"{path}.{name}.weight", part, 0))
        attention.proj.weight.copy_(
            self._part(f"{path}.self_attn.o_proj.weight", attention.proj.weight, 1)
        )
        mlp.fc2_weight.copy_(self._part(f"{path}.mlp.down_proj.weight", mlp.fc2_weight, 1))

    def _adapt(self, attention: Any, path: str) -> None:
        """By column B is cut, and A's rows of s are gathered; by row A is cut, and rows of s are summed and kept."""
        rank, width, device = self.spec.rank, self.spec.shape["hidden_size"], self.device
        down, o_down = (torch.empty(rank, width, device=device) for _ in range(2))
        fill_adapters({f"{path}.q_proj.lora_A": down, f"{path}.o_proj.lora_A": o_down}.items())
        rows = attention.layernorm_qkv.weight.shape[0]
        up, o_up = torch.zeros(rows, rank, device=device), torch.zeros(width, rank, device=device)
        dtype = dtype_of(device)
        qkv = Adapter(down, up, P, dtype, partial(gather_rows, self.group))
        o_down = o_down.chunk(self.ranks, 1)[self.rank]
        o = Adapter(o_down, o_up, P, dtype, partial(sum_rows, self.group))
        attention.layernorm_qkv = WithAdapter(attention.layernorm_qkv, qkv, normed=True)
        attention.proj = WithAdapter(attention.proj, o, normed=False)
        self.replicated += [qkv.lora_A, o.lora_B]

    def loss(self, ids: Tensor) -> Tensor:
        model, ids = self.model, ids.t()
        hidden = model.embedding[ids.chunk(self.ranks)[self.rank]]
        with autocast(self.te, self.group):
            for layer in model.layers:
                hidden = layer(
                    hidden,
                    rotary_pos_emb=model.angles,
                    is_first_microbatch=self.casts < self.warmup_steps,
                )
        self.casts += 1
        logits = model.head(model.norm(hidden))
        labels = torch.full_like(ids, IGNORE)
        labels[:-1] = ids[1:]
        # TE's kernels take a stride from the last dimension of labels, and one before that of logits, also of size 1
        rows, own = logits.view(1, -1, logits.shape[-1]), labels.reshape(-1)[None]
        loss: Tensor = self.te.parallel_cross_entropy(
            rows, own, reduce_loss=True, dist_process_group=self.group
        )
        return loss

    def step(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(ids)
        loss.backward()
        sum_gradients(self.replicated, self.group)
        self.optimizer.step()
        return loss.detach()

    def close(self) -> None:
        if self.overlap:
            self.te.destroy_ub()


def start_user_buffers(te: Any, shape: list[int], ranks: int) -> None:
    """Collective over all ranks. NVLink's multicast stays off, which shared hosts forbid: copies go by CUDA's IPC."""
    os.environ["UB_SKIPMC"] = "1"
    if ranks != dist.get_world_size():
        raise ValueError(f"user buffers are of all {dist.get_world_size()} ranks, found {ranks}")
    te.initialize_ub(
        shape,
        ranks,
        quantization_modes=[te.UserBufferQuantizationMode.FP8],
        dtype=torch.bfloat16,
        ub_cfgs={"qkv_dgrad": RING, "fc1_dgrad": RING},
    )
