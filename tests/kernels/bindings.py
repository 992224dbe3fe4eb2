# SPDX-License-Identifier: Apache-2.0
"""The values that the extension's launching functions take, by flat names, so that a test can change one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lorakernels import _C

DROPOUT = ("slot", "p", "site", "row0", "col0", "dropped", "chunks")
WHERE, SIZES, RANK = ("stream", "device"), ("rows", "cols"), ("rows", "cols", "rank")
SCALE, WEIGHT = ("amax", "kept", "partials"), ("weight", "weight_scale_inv")
GROUPED = ("weight", "weight_scale_inv", "group_of", "groups")
PRODUCT = (*SIZES, "depth", "rank", "segment_rows", "blocks")
TILES = ("splits", "tile_rows", "tile_cols", "multiprocessors")
STATES = ("forward", "backward", "current", "n", "history_len")
RECIPE = ("fp8_max_forward", "fp8_max_backward", "margin", "amax_compute_algo")
BIAS = {"sizes": SIZES, "dtypes": ("dtype", "bias_dtype"), "dropout": DROPOUT, "where": WHERE}
LINEAR = {
    "out": ("y", "bias", "residual"),
    "x": ("x8", "x_scale_inv"),
    "weight": WEIGHT,
    "up": ("B", "s", "scaling"),
    "sizes": PRODUCT,
    "types": ("dtype", "b_dtype", "bias_dtype", "by_column"),
    "tiles": TILES,
    "where": WHERE,
}
GRAD_INPUT = {
    "out": ("dx", "ds", "A"),
    "dy": ("dy8", "dy_scale_inv"),
    "weight": WEIGHT,
    "dropout": DROPOUT,
    "sizes": PRODUCT,
    "types": ("dtype", "a_dtype", "format"),
    "tiles": TILES,
    "where": WHERE,
}
# function: {parameter: its name, or those of its entries}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "amax_and_scale_update": {
        "states": STATES,
        "recipe": RECIPE,
        "gated": "gated",
        "where": WHERE,
    },
    "bias_dropout_add": {n: n for n in ("out", "x", "bias", "residual")} | BIAS,
    "bias_dropout_add_backward": {n: n for n in ("dx", "dbias", "partial", "dout")} | BIAS,
    "check_longest_document": {n: n for n in ("starts", "documents", "longest")} | {"where": WHERE},
    "dropout_mask": {"out": "out", "sizes": SIZES, "dropout": DROPOUT, "where": WHERE},
    "dropped_bits": {
        "dropped": "bits",
        "sizes": SIZES,
        "dropout": DROPOUT,
        "where": WHERE,
    },
    "fp8_block_grad_input": GRAD_INPUT,
    "fp8_block_linear": LINEAR,
    "fp8_grad_input": GRAD_INPUT,
    "fp8_linear_lora": LINEAR,
    "grouped_grad_input": {
        "out": ("dx", "ds", "A"),
        "dy": ("dy8", "dy_scale_inv"),
        "weight": GROUPED,
        "sizes": PRODUCT,
        "types": ("dtype", "a_dtype", "format"),
        "tiles": TILES,
        "where": WHERE,
    },
    "grouped_linear_lora": {
        "y": "y",
        "x": ("x8", "x_scale_inv"),
        "weight": GROUPED,
        "up": ("B", "s", "scaling"),
        "sizes": PRODUCT,
        "types": ("dtype", "b_dtype"),
        "tiles": TILES,
        "where": WHERE,
    },
    "lora_grad_a": {
        "out": ("dA", "partial"),
        "ds": ("ds", "ds_pitch"),
        "x": ("x", "scale_inv", "in_blocks"),
        "sizes": RANK,
        "dtypes": ("dtype", "out_dtype"),
        "dropout": DROPOUT,
        "where": WHERE,
    },
    "quantize_grad": {
        "out": ("dy8", "scale_inv", "ds", "dB", "workspace"),
        "dy": "dy",
        "up": ("B", "s", "scaling"),
        "scale": SCALE,
        "sizes": (*RANK, "projections"),
        "types": ("dtype", "b_dtype", "format", "fp8_max", "power_of_two"),
        "mask": (DROPOUT, "dropped_cols"),
        "where": WHERE,
    },
    "quantize_lora_down": {
        "out": ("x8", "scale_inv", "s", "workspace"),
        "x": "x",
        "lora_A": "lora_A",
        "scale": SCALE,
        "sizes": RANK,
        "types": ("dtype", "a_dtype", "power_of_two"),
        "dropout": DROPOUT,
        "where": WHERE,
    },
    "transpose_fp8": {"out": "out", "in_": "in_", "sizes": SIZES, "where": WHERE},
}


def names_of(function: str) -> list[str]:
    """The flat names of what `function` takes, in order."""
    return [*_leaves(tuple(ARGUMENTS[function].values()))]


def composed(function: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the extension's `function` for these values."""
    return {k: _composed(form, values) for k, form in ARGUMENTS[function].items()}


def call(function: str, values: Mapping[str, Any]) -> None:
    """Call the extension's `function` with these values."""
    getattr(_C, function)(**composed(function, values))


def flat(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `call` would take for these values by parameters."""
    forms = ARGUMENTS.get(function)
    if forms is None:
        return dict(arguments)
    return {
        name: value for k, form in forms.items() for name, value in _taken_apart(form, arguments[k])
    }


def _taken_apart(form: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(form, str):
        yield form, value
    else:
        for part, each in zip(form, [None] * len(form) if value is None else value, strict=True):
            yield from _taken_apart(part, each)


def _leaves(form: Any) -> Iterator[str]:
    if isinstance(form, str):
        yield form
    else:
        for part in form:
            yield from _leaves(part)


def _composed(form: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(form, str):
        return values[form]
    return tuple(_composed(part, values) for part in form)
