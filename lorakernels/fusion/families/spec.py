# SPDX-License-Identifier: Apache-2.0
"""LayerSpec: what `fuse` knows of one family's decoder layer. No other code of fusion/ names an attribute of a model.

A fused layer computes (autograd/decoder/layer.py):

    h2 = h + f o(attention(RoPE([q, k, v](RMSNorm(h)))))      out = h2 + f down(act(gate(x)) ⊙ up(x)), x = RMSNorm(h2)

RoPE turns whole heads, as transformers' `rotate_half` does, and q and k may be normed before it. Some layers may be
without RoPE. f is one number, which is 1 in most families. The sum is an operation of its own where f is not 1, or
where the results of o and down are normed before they are added. There may be no norm before q, k, v and before gate,
up. act is SiLU or the tanh form of GELU. Attention's scores may have a cap. A family fits if its layer computes the
same. Its file here says where the parts are, and refuses what changes the sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

_ACTIVATIONS = {
    "silu": ("SiLU", ("SiLU", "SiLUActivation")),
    "gelu_tanh": ("GELU by tanh", ("GELUTanh", "PytorchGELUTanh")),
}


def no_objection(layer: Any) -> str | None:
    """`LayerSpec.refuse` of a family that has nothing to refuse."""
    return None


class Heads(NamedTuple):
    """H query and Hk key heads of `dim` columns; `scale` is the factor of q kᵀ."""

    query: int
    key: int
    dim: int
    scale: float


@dataclass(frozen=True)
class LayerSpec:
    """Where the parts of a family's decoder layer are. A place is a module's path inside of the layer.

    transformers defines the classes `<family>DecoderLayer`, `<family>Attention`, `<family>MLP` and `<family>RMSNorm`
    in one file. The layer has the modules named here and no others.

    Attributes:
        family: what the names of the classes begin with, such as "Llama".
        attention, mlp: the two modules that hold the projections.
        norms: the RMSNorms of attention's and of the MLP's input; None where the input is not normed.
        qkv: three projections; or one, whose rows are q's heads, then k's, then v's.
        output: the projection of attention's result.
        gate_up: two projections; or one, whose rows are gate's, then up's.
        down: the projection of the MLP's result.
        activation: the module of the gate's activation.
        last_norm: the name of the model's last norm, in the module that has the list of layers.
        head_norms: the RMSNorms of q and of k, or (). The size of their weights says whether each head is normed by
            itself or all heads of a token together.
        post_norms: the RMSNorms of attention's and of the MLP's result, before it is added, or ().
        norms_add_one: whether norms multiply by 1 + w. If not, they multiply by w.
        norms_in_fp32: whether norms multiply in fp32 and return their input's dtype. If not, they round to it before
            they multiply, and return the wider of both dtypes. A fused layer's kernels always round before.
        act: the function that `activation` must compute, "silu" or "gelu_tanh".
        cap: the attribute with C, where scores s become C tanh(s / C); None where the family has no cap.
        dropouts: nn.Dropouts of the layer. Their p must be 0.
        window: the attribute with the sliding window's number of tokens, or None where the family has no window.
        rope: the attribute that is false in layers without RoPE, or None where every layer has it.
        residual_factor: the attribute with f, by which attention's and the MLP's results are multiplied before they are
            added; None where f is 1.
        refuse: says in words why a fused layer would compute something else than the given layer, or returns None.
    """

    family: str
    attention: str
    mlp: str
    norms: tuple[str | None, str | None]
    qkv: tuple[str, ...]
    output: str
    gate_up: tuple[str, ...]
    down: str
    activation: str
    last_norm: str
    head_norms: tuple[str, ...] = ()
    post_norms: tuple[str, ...] = ()
    norms_add_one: bool = False
    norms_in_fp32: bool = False
    act: str = "silu"
    cap: str | None = None
    dropouts: tuple[str, ...] = ()
    window: str | None = None
    rope: str | None = None
    residual_factor: str | None = None
    refuse: Callable[[Any], str | None] = no_objection

    @property
    def layer(self) -> str:
        """The name of the decoder layer's class."""
        return f"{self.family}DecoderLayer"

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The projections that share an input, group by group, in the order in which they run."""
        return self.qkv, (self.output,), self.gate_up, (self.down,)

    @property
    def results(self) -> tuple[int, ...]:
        """How many results each of `groups` has, whether separate projections or a packed one make them."""
        return 3, 1, 2, 1

    @property
    def all_norms(self) -> tuple[str, ...]:
        return *filter(None, self.norms), *self.head_norms, *self.post_norms

    def children(self) -> dict[str, set[str]]:
        """{owner: the names of its modules}, of the layer itself, "", and of every module that holds a part of it."""
        names_of: dict[str, set[str]] = {}
        projections = [place for group in self.groups for place in group]
        places = (self.attention, self.mlp, *self.all_norms, *projections, *self.dropouts)
        for place in (*places, self.activation):
            owner, _, name = place.rpartition(".")
            names_of.setdefault(owner, set()).add(name)
        return names_of

    def own_class(self, layer: nn.Module, part: str) -> type[nn.Module] | None:
        """The class `<family><part>` that transformers defines in the file of the layer's class, or None."""
        file, name = type(layer).__module__, self.family + part
        kind = getattr(sys.modules.get(file), name, None)
        ours = isinstance(kind, type) and (kind.__module__, kind.__name__) == (file, name)
        return kind if ours else None

    def heads(self, layer: nn.Module) -> Heads:
        """The heads of a layer, fused or not."""
        attention: Any = layer.get_submodule(self.attention)
        output: Any = layer.get_submodule(self.output)
        query, config = attention.config.num_attention_heads, attention.config
        dim = output.in_features // query
        return Heads(query, config.num_key_value_heads, dim, attention.scaling)

    def looks_back(self, layer: nn.Module) -> bool:
        """Whether a token attends to itself and earlier ones only."""
        return getattr(getattr(layer, self.attention, None), "is_causal", True) is True

    def drops(self, layer: nn.Module) -> str | None:
        """The dropout that the layer's own forward would draw now, as "<its place> = <its p>", or None."""
        attention: Any = getattr(layer, self.attention)
        if attention.training and (p := getattr(attention, "attention_dropout", 0.0)):
            return f"{self.attention}.attention_dropout = {p}"
        for place in self.dropouts:
            module = attrgetter(place)(layer)
            if module.training and module.p:
                return f"{place}.p = {module.p}"
        return None

    def window_of(self, layer: nn.Module) -> int | None:
        """How many tokens a token attends to, itself among them; None if to all."""
        if self.window is None:
            return None
        value: Any = layer
        for name in self.window.split("."):
            value = getattr(value, name, None)
        window: int | None = value
        return window

    def turns(self, layer: nn.Module) -> bool:
        """Whether RoPE turns the heads of q and k."""
        return self.rope is None or bool(attrgetter(self.rope)(layer))

    def norms_whole(self, layer: nn.Module) -> bool:
        """Whether all heads of a token's q, or k, are normed together."""
        if not self.head_norms:
            return False
        columns: int = layer.get_parameter(f"{self.head_norms[0]}.weight").numel()
        return columns != self.heads(layer).dim

    def cap_of(self, layer: nn.Module) -> float | None:
        """C, by which attention's scores are capped, or None."""
        cap: float | None = None if self.cap is None else attrgetter(self.cap)(layer)
        return cap

    def factor_of(self, layer: nn.Module) -> float:
        """The factor of attention's and the MLP's results before they are added."""
        return (
            1.0 if self.residual_factor is None else float(attrgetter(self.residual_factor)(layer))
        )

    def objections(self, layer: nn.Module) -> Iterator[str]:
        """Yield, in words, every setting of `layer` with which a fused layer would compute something else."""
        attention: Any = layer.get_submodule(self.attention)
        backend = getattr(attention.config, "_attn_implementation", None)
        runs = "sdpa" if self.cap is None else "eager"  # transformers has no cap in its sdpa
        if backend not in (runs, None):
            what = "scaled dot product" if self.cap is None else "eager's"
            yield (
                f"a fused layer runs {what} attention, found attn_implementation={backend!r}: set "
                f'model.set_attn_implementation("{runs}")'
            )
        if dropout := getattr(attention, "attention_dropout", 0.0):
            yield f"attention_dropout must be 0, found {dropout}"
        if not self.looks_back(layer):
            yield (
                f"{self.attention}.is_causal must be True, found {attention.is_causal!r}: a fused layer's attention is "
                "causal"
            )
        kind, (named, classes) = type(attrgetter(self.activation)(layer)), _ACTIVATIONS[self.act]
        if kind.__name__ not in classes or not kind.__module__.startswith(
            ("torch.nn.", "transformers.")
        ):
            yield f"the activation must be {named}, found {kind.__name__}"
        epsilons = {place: epsilon(layer.get_submodule(place)) for place in self.all_norms}
        if len(set(epsilons.values())) > 1:
            yield f"norms must have one epsilon, found {epsilons}"
        for place in self.dropouts:
            module = layer.get_submodule(place)
            if type(module) is not nn.Dropout or module.p:
                yield f"{place} must be Dropout(p=0), found {module}"
        if objection := self.refuse(layer):
            yield objection


def epsilon(norm: Any) -> float:
    """ε of an RMSNorm."""
    value: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return value


def scale(norm: Any, adds_one: bool) -> Tensor:
    """The factor [K] of an RMSNorm: its weight w, or 1 + w in fp32."""
    weight: Tensor = norm.weight
    return 1.0 + weight.float() if adds_one else weight
