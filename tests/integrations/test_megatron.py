# SPDX-License-Identifier: Apache-2.0
"""Our layers built as Megatron-Core builds its own, beside the whole linear; its signature where it is installed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels import DelayedScaling, LoRAConfig
from lorakernels.integrations.megatron import ColumnParallelLinear, RowParallelLinear
from tests.processes import on_ranks

S, B, K, N = 4, 3, 16, 32
KINDS = {"Column": ColumnParallelLinear, "Row": RowParallelLinear}
# the keywords of megatron-core 0.16.1's constructors, with the values that its layers pass
RECORDED: dict[str, dict[str, Any]] = {
    "Column": {
        "bias": True, "gather_output": False, "stride": 1, "keep_master_weight_for_test": False,
        "skip_bias_add": True, "skip_weight_param_allocation": False, "embedding_activation_buffer": None,
        "grad_output_buffer": None, "is_expert": False, "tp_comm_buffer_name": "fc1", "disable_grad_reduce": False,
    },
    "Row": {
        "bias": True, "input_is_parallel": True, "skip_bias_add": True, "stride": 1,
        "keep_master_weight_for_test": False, "is_expert": False, "tp_comm_buffer_name": "proj",
    },
}  # fmt: skip
LORA = LoRAConfig(r=4, fp8=None, lora_dropout=0.0)


def fill(weight: Tensor) -> Tensor:
    """Megatron's init_method: in place, equal on all ranks."""
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    return weight.copy_(drawn)


def config(sequence: bool = False, **changes: Any) -> Any:
    fields = {"use_cpu_initialization": True, "perform_initialization": True}
    return SimpleNamespace(
        **{"params_dtype": torch.float32, "sequence_parallel": sequence, **fields, **changes}
    )


def built(kind: str, group: Any, sequence: bool = False, **changes: Any) -> Any:
    torch.manual_seed(0)
    options = {**RECORDED[kind], "lora": LORA, **changes}
    return KINDS[kind](K, N, config=config(sequence), init_method=fill, tp_group=group, **options)


def said_by(act: Any) -> str:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        act()
    return str(error.value)


def parts(kind: str, sequence: bool) -> dict[str, Any]:
    """Differences of y and dx from the whole linear's, and how the adapter's parameters are marked."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    layer = built(kind, group, sequence)
    whole = fill(torch.empty(N, K))
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(S, B, K, generator=generator), torch.randn(S, B, N, generator=generator)
    y, dx = x @ whole.T, dy @ whole  # B = 0
    rows = (lambda t: t.chunk(size)[rank]) if sequence else (lambda t: t)
    columns = lambda t: t.chunk(size, -1)[rank]  # noqa: E731
    into, out = (rows, columns) if kind == "Column" else (columns, rows)
    own = into(x).contiguous().requires_grad_()
    found, bias = layer(own)
    found.backward(out(dy).contiguous())
    cut = {n for n, p in layer.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    return {
        "y": float((found - out(y)).abs().max()),
        "dx": float((own.grad - into(dx)).abs().max()),
        "bias": bias is not None and not bias.any(),
        "cut": cut,
        "checkpoint": said_by(layer.sharded_state_dict),
    }


def in_fp8(kind: str) -> float:
    """The largest error of a weight of the rank's part over FP8, relative to the weight."""
    lora = LoRAConfig(r=4, fp8=DelayedScaling())
    found = built(kind, dist.group.WORLD, lora=lora).dequantized_weight()
    part = fill(torch.empty(N, K)).chunk(2, 0 if kind == "Column" else 1)[dist.get_rank()]
    normal = part.abs() > part.abs().max() * 2.0**-14  # 448 · 2⁻¹⁴ is above e4m3's smallest normal
    return float(((found - part) / part).abs()[normal].max())


def of_megatrons_group() -> bool:
    """Without a tp_group a layer takes Megatron's, here that of a stand-in."""
    state = SimpleNamespace(get_tensor_model_parallel_group=lambda: dist.group.WORLD)
    names = ("megatron", "megatron.core", "megatron.core.parallel_state")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, state)
        return built("Row", None).ranks.group is dist.group.WORLD


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {f"{k} {s}": parts(k, s) for k in KINDS for s in (False, True)}
    found["its group"] = of_megatrons_group()
    return found | {f"{kind} in FP8": in_fp8(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(worker, 2, "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole rows", "split rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_the_whole_linear(results: Any, kind: str, sequence: bool) -> None:
    for result in results:
        found = result[f"{kind} {sequence}"]
        assert found["y"] < 1e-5 and found["dx"] < 1e-5  # sums of 32 products of normal numbers
        assert found["bias"] and "not supported yet" in found["checkpoint"]
        assert found["cut"] == ({"lora_B", "bias"} if kind == "Column" else {"lora_A"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_weight_goes_into_fp8(results: Any, kind: str) -> None:
    assert all(0 < result[f"{kind} in FP8"] <= 2.0**-4 for result in results)  # 3 bits, rounded


@pytest.mark.slow
def test_megatrons_own_group_is_the_default(results: Any) -> None:
    assert all(result["its group"] for result in results)


class OneRank:
    def size(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Column", {"is_expert": True}, "is_expert must be False, found True"),
        ("Column", {"gather_output": True}, "gather_output must be False"),
        ("Column", {"skip_weight_param_allocation": True}, "skip_weight_param_allocation must be"),
        ("Row", {"input_is_parallel": False}, "input_is_parallel must be True"),
        ("Row", {"stride": 2}, "stride must be 1, found 2"),
        ("Row", {"colour": 1}, "RowParallelLinear takes no ['colour']"),
    ],
)
def test_what_is_not_there_is_refused(kind: str, changes: dict[str, Any], said: str) -> None:
    assert said in said_by(partial(built, kind, OneRank(), **changes))


def test_float16_is_refused() -> None:
    half = config(params_dtype=torch.float16)
    make = partial(ColumnParallelLinear, K, N, config=half, init_method=fill, tp_group=OneRank())
    assert "config.params_dtype must be float32 or bfloat16" in said_by(make)


@pytest.mark.slow
def test_megatron_is_imported_only_when_used() -> None:
    code = "import sys, lorakernels.integrations.megatron; sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_of_megatron_is_known(kind: str) -> None:
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers", exc_type=ImportError)
    signature = inspect.signature(getattr(layers, f"{kind}ParallelLinear").__init__)
    theirs = set(signature.parameters) - {"self", "input_size", "output_size"}
    assert theirs == {*RECORDED[kind], "config", "init_method", "tp_group"}


def test_a_spec_of_megatron_builds_a_layer() -> None:
    specs = pytest.importorskip("megatron.core.transformer.spec_utils", exc_type=ImportError)
    spec = specs.ModuleSpec(module=RowParallelLinear, params={"lora": LORA})
    make = partial(
        specs.build_module, spec, K, N, config=config(), init_method=fill, tp_group=OneRank(),
        **{**RECORDED["Row"], "input_is_parallel": False},
    )  # fmt: skip
    assert "input_is_parallel must be True" in said_by(make)  # Megatron hands on what it said
