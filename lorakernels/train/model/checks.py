# SPDX-License-Identifier: Apache-2.0
"""Refuse a model that `finetune` would train wrongly, before its first step.

Three properties are required of a model. Its logits must be its output head applied to its hidden states, with no
change but what its config says. The loss is computed by our own code instead of the model's. Its rows must be what the
job says: packed documents computed as if each were alone, or each row a causal sequence. And one document must be what
transformers' usual call computes.

Each comparison sends the same shapes and the same tokens through the same kernels on both sides. In eval, an FP8 base
scales every tensor by its own amax. The set of tokens must therefore be the same; only their places differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels import PipelineParallel, change_of_logits
from lorakernels.train.data.packing import PackedBatch
from lorakernels.train.errors import ModelError
from lorakernels.train.model.loss import changed
from lorakernels.train.model.model import decoder_and_head, hidden_states
from lorakernels.train.ranks.ranks import RunRanks, is_about_peers

FIRST, SECOND = 5, 7  # lengths of a row's two documents, in tokens
LARGE = 1000.0  # the largest logit given to a model's own tail; caps in use are 30 and 50
ROUNDINGS = 16  # more than attention accumulates over the layers: their roundings are independent
E4M3_ROUNDING = 2.0**-4


_SAID = {
    "later": "lets tokens see later ones where it gets no mask: hidden states change by {} with the tokens behind them",
    "neighbour": "lets packed documents see each other: hidden states change by {} with the document before",
    "place": (
        "computes packed documents by where they lie in a row, not by their position_ids: hidden states change by {}"
    ),
    "usual": "computes one document otherwise by transformers' usual call, with a 2-D mask: hidden states differ by {}",
}


class Isolation(NamedTuple):
    """Relative differences of hidden states, each the root of a mean of squares.

    Attributes:
        neighbour: change of second documents when the first document of their row was exchanged.
        place: change of all documents when the documents of a row changed their order.
        rounding: change of all documents when the embeddings were perturbed.
    """

    neighbour: float
    place: float
    rounding: float


class Causality(NamedTuple):
    """Relative differences of hidden states, as in `Isolation`. Each row is one sequence.

    Attributes:
        later: change of first parts when the second parts of the rows were exchanged.
        rounding: change of all tokens when the embeddings were perturbed.
    """

    later: float
    rounding: float


def check_same_layers(model: nn.Module, ranks: RunRanks) -> None:
    """Collective: refuse ranks whose layers differ, for example because one could not read them into FP8.

    In a pipeline each rank holds only its own stages. It is compared with the ranks that hold the same stages, and with
    a rank that has read the whole model.

    Raises:
        ModelError: a module's class, or a dtype in it, differs from the module on the first rank that holds it.
    """
    gone = {*PipelineParallel.elsewhere(model)}
    forms = {
        path: _form(module)
        for path, module in model.named_modules()
        if gone.isdisjoint(_and_above(path))
    }
    first: dict[str, tuple[str, int]] = {}
    for rank, theirs in enumerate(ranks.from_all(forms)):
        first = {path: (form, rank) for path, form in theirs.items()} | first

    def check() -> None:
        for path, (form, rank) in first.items():
            if forms.get(path) != form and gone.isdisjoint(_and_above(path)):
                raise ModelError(
                    f"all ranks must hold the same layers, found {path} to be {forms.get(path)}, on rank {rank} {form}"
                )

    ranks.together(check)


def _and_above(path: str) -> list[str]:
    """The paths of a module and of all modules that contain it."""
    names = path.split(".")
    return [".".join(names[: i + 1]) for i in range(len(names))]


def _form(module: nn.Module) -> str:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    dtypes = [f"{name} {str(tensor.dtype)[6:]}" for name, tensor in tensors]
    return f"{type(module).__name__}({', '.join(dtypes)})"


@torch.no_grad()
def check_model(model: Any, isolate: bool | None = None) -> None:
    """Raise ModelError if this job would train the model wrongly. The model is left as it was.

    *Logits.* The model's own tail and its head get the same hidden states, so large that the largest logit is 1000.
    The results may differ by one rounding of that logit. The reason is that a head called with other strides sums in
    another order, in fp32, and rounds once. A cap of 30 differs by 970, a scale of 1/16 by 937, unless the config
    names them: then the head's logits are changed as the loss changes them. The largest is three times a named cap, so
    that logits lie all along its curve, and three roundings are allowed: for a quotient, a tanh and a product.

    *Rows.* See `isolation`, and `causality` where documents are not isolated. No difference may exceed the change that
    perturbed embeddings cause in the same rows. The perturbation is 16 roundings of the dtype, 2⁻⁴ in bf16. Over an
    FP8 base it is at least 2⁻⁴, one rounding to e4m3.

    In a right model, exchanged neighbours change nothing at all: every token keeps its column and every tensor its
    amax. Documents in another order add up their attention in another order. That costs one rounding of fp32 per
    layer, of which few survive the rounding to the dtype. Both sides go through the same depth, so the bound grows as
    rounding does.

    *The usual call.* Rows of one document, as the job computes them, are compared with the model's own result for a
    2-D mask. A model whose tokens see later ones, such as an encoder, has another one.

    Args:
        model: with adapters, on its device.
        isolate: whether the job computes packed documents apart. If False, each row is one causal sequence. None checks
            both.
    """
    with evaluating(model):
        for apart in (True, False) if isolate is None else (isolate,):
            try:
                _refuse_wrong(model, apart)
            except ModelError as error:
                if apart or not _isolates(model):
                    raise
                raise ModelError(f"{error}; leave --no-isolate-documents out") from error


def _isolates(model: Any) -> bool:
    """Whether the model could be trained with documents apart."""
    try:
        _refuse_wrong(model, True)
    except ModelError:
        return False
    return True


def _refuse_wrong(model: Any, isolate: bool) -> None:
    """Raise ModelError if the model, in eval, computes another thing than the job takes it for."""
    name = type(model).__name__
    try:
        _check_logits(model)
        differences = isolation(model) if isolate else causality(model)
        usual = _from_usual_call(model, isolate)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, (ModelError, torch.OutOfMemoryError)) or is_about_peers(error):
            raise
        how = "with position_ids and a 4-D mask" if isolate else "without a mask"
        raise ModelError(
            f"{name} does not run as finetune runs a decoder, {how}: {type(error).__name__}: {error}"
        ) from error
    _refuse_differences(name, differences, usual)


def _refuse_differences(name: str, changes: Isolation | Causality, usual: float) -> None:
    """Raise ModelError for a difference beyond rounding. `usual`: that from transformers' usual call."""
    for field, text in _SAID.items():
        difference = usual if field == "usual" else getattr(changes, field, 0.0)
        if not difference <= changes.rounding:  # NaN is not
            raise ModelError(
                f"{name} {text.format(f'{difference:.3g} of their size')}, rounding accounts for "
                f"{changes.rounding:.3g}; finetune cannot train it correctly"
            )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the context, the model is in eval mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check_logits(model: Any) -> None:
    decoder, head = decoder_and_head(model)
    rows, change = _documents(model)[0].input_ids, change_of_logits(model.config.get_text_config())
    cap = None if change is None else change.cap
    replaced: list[Tensor] = []

    def enlarge(module: nn.Module, args: object, output: Any) -> Any:
        hidden = output.last_hidden_state
        largest = head(hidden).float().abs().max()
        wanted = LARGE if change is None or cap is None else 3 * cap / change.scale
        factor = torch.where(largest > 0, wanted / largest, 1.0)
        replaced.append((hidden.float() * factor).to(hidden.dtype))
        output.last_hidden_state = replaced[-1]
        return output

    # OPT, for example, calls a part of its own decoder. If both modules run, the outer one finishes last.
    hooked = {id(module): module for module in (decoder, model.get_decoder())}.values()
    hooks = [module.register_forward_hook(enlarge) for module in hooked]
    try:
        logits = model(input_ids=rows, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    expected = changed(head(replaced[-1]).float(), change)
    difference = (logits.float() - expected).abs().max()
    roundings = 1 if cap is None else 3
    allowed = roundings * torch.finfo(replaced[-1].dtype).eps * expected.abs().max()
    if not bool(difference <= allowed):
        raise ModelError(
            f"{type(model).__name__} changes logits after its output head (one of {float(expected.abs().max()):.4g} by "
            f"up to {float(difference):.4g}): finetune cannot train it correctly"
        )


@torch.no_grad()
def isolation(model: Any) -> Isolation:
    """Measure how far the hidden states of documents A, B, C, D depend on their places.

    The four forwards, in eval, have these rows:

    * [A B] [C D], the base.
    * [C B] [A D], which exchanges the neighbours of B and D.
    * [B A] [D C], which exchanges the places.
    * [A B] [C D] again, with perturbed embeddings.
    """
    rows, exchanged, turned = _documents(model)
    base = hidden_states(model, rows).float()
    neighbours = hidden_states(model, exchanged).float()
    order = hidden_states(model, turned).float()
    with _perturbed(model):
        moved = hidden_states(model, rows).float()
    back = torch.cat([order[:, SECOND:], order[:, :SECOND]], 1)
    return Isolation(
        _relative(neighbours[:, FIRST:], base[:, FIRST:]),
        _relative(back, base),
        _relative(moved, base),
    )


@torch.no_grad()
def causality(model: Any) -> Causality:
    """Measure how far the hidden states of rows that are one sequence each depend on later tokens.

    The three forwards, in eval, have these rows:

    * [A B] [C D], the base.
    * [A D] [C B], which exchanges what comes later.
    * [A B] [C D] again, with perturbed embeddings.
    """
    rows = _documents(model)[0].input_ids
    turned = torch.cat([rows[:, :FIRST], rows.flip(0)[:, FIRST:]], 1)
    base, later = (hidden_states(model, _whole_rows(x), False).float() for x in (rows, turned))
    with _perturbed(model):
        moved = hidden_states(model, _whole_rows(rows), False).float()
    return Causality(_relative(later[:, :FIRST], base[:, :FIRST]), _relative(moved, base))


def _from_usual_call(model: Any, isolate: bool) -> float:
    """Relative difference between hidden states of one-document rows and the same from transformers' usual call."""
    rows, (decoder, _) = _documents(model)[0].input_ids, decoder_and_head(model)
    usual = decoder(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False)
    packed = hidden_states(model, _whole_rows(rows), isolate).float()
    return _relative(packed, usual.last_hidden_state.float())


def _whole_rows(rows: Tensor) -> PackedBatch:
    return _packed_rows([[row] for row in rows])


def _documents(model: Any) -> tuple[PackedBatch, PackedBatch, PackedBatch]:
    """Batches of two rows of two documents: as given, with exchanged first documents, with both rows reversed."""
    device = next(model.parameters()).device
    words = model.config.get_text_config().vocab_size
    a, b, c, d = (
        torch.linspace(0, words - 1, 2 * (FIRST + SECOND), device=device)
        .long()
        .split([FIRST, SECOND, FIRST, SECOND])
    )
    return (
        _packed_rows([[a, b], [c, d]]),
        _packed_rows([[c, b], [a, d]]),
        _packed_rows([[b, a], [d, c]]),
    )


def _packed_rows(rows: list[list[Tensor]]) -> PackedBatch:
    ids = torch.stack([torch.cat(row) for row in rows])
    device = ids.device
    positions = torch.cat([torch.arange(len(part), device=device) for part in rows[0]])
    segments = torch.cat(
        [torch.full((len(part),), i, device=device) for i, part in enumerate(rows[0])]
    )
    places = positions.expand_as(ids), segments.expand_as(ids)
    return PackedBatch(ids, ids, *places, ids.numel())


@contextlib.contextmanager
def _perturbed(model: Any) -> Iterator[None]:
    """Inside the context, embeddings are larger or smaller by `ROUNDINGS` roundings, at random."""
    over_fp8 = any(getattr(m, "weight_scale_inv", None) is not None for m in model.modules())

    def move(module: nn.Module, args: object, output: Tensor) -> Tensor:
        relative = ROUNDINGS * torch.finfo(output.dtype).eps / 2
        if over_fp8:
            relative = max(relative, E4M3_ROUNDING)
        signs = torch.randint(2, output.shape, generator=torch.Generator().manual_seed(0))
        return output * (1 + relative * (2 * signs - 1).to(output))

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
