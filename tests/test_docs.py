# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md and of docs/ runs as it stands, on a small Llama; what it says of a GPU is left to one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lorakernels
from lorakernels import LoRAConfig, PhiloxState, apply_lora, fuse, load_quantized
from lorakernels.parallel import shard_base
from tests.graphs.layers import managed
from tests.processes import meet

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "graphs/README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


CONFIG = LoRAConfig(r=4, target_modules="all-linear")
# Which test runs a page's blocks, in their order
RUN_BY = {
    "README.md": ["test_ten_lines"],
    "docs/getting-started.md": ["test_a_peft_script", "test_a_loss_without_logits"],
    "docs/adapters.md": [
        "test_loading",
        "test_a_start_from_the_base",
        "test_several_adapters",
        "test_experts",
        "test_saving",
    ],
    "docs/scales-and-dropout.md": ["test_a_recipe"],
    "docs/fused-layers.md": ["test_fused_layers"],
    "docs/plan.md": ["test_a_plan"],
    "docs/parallel.md": [
        "test_a_sharded_base",
        "test_an_offloaded_base",
        "test_a_sharded_optimizer",
        "test_tensor_parallel",
        "test_saving_parts",
        "test_parts_read_alone",
        "test_a_sharded_base_beneath_parts",
        "test_layers_for_authors",
        "test_context_parallel",
        "test_pipeline_parallel",
        "test_stages_of_shared_rows",
        "test_fsdp",
    ],
    "graphs/README.md": ["test_graphs"],
}


def test_every_block_has_a_test_that_runs_it() -> None:
    found = {page: len(blocks(page)) for page in PAGES if blocks(page)}
    assert found == {page: len(tests) for page, tests in RUN_BY.items()}
    assert {name for tests in RUN_BY.values() for name in tests} <= set(globals())


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_names_its_language(page: str) -> None:
    """So that no Python is missed."""
    text = (ROOT / page).read_text("utf-8")
    assert all(re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a block finds: the public names, and a model in memory and in path/to/llama."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))
    model.save_pretrained("path/to/llama")
    return {
        **{name: getattr(lorakernels, name) for name in lorakernels.__all__},
        "torch": torch,
        "model": model,
    }


def run(code: str, names: dict[str, Any]) -> None:
    exec(code if torch.cuda.is_available() else code.replace(".cuda()", ""), names)


def train(names: dict[str, Any]) -> None:
    model, optimizer = names["model"], names["optimizer"]
    model.train()
    ids = torch.arange(16, device=model.device)[None]
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_ten_lines(names: dict[str, Any]) -> None:
    (code,) = blocks("README.md")
    before, after = code.split("...  # train as always: model.train(), backward, step, zero_grad\n")
    assert len([line for line in (before + after).splitlines() if line]) <= 10
    run(before, names)
    train(names)
    run(after, names)
    assert names["attached"].steps == 5
    assert Path("my-adapter/adapter_model.safetensors").is_file()


def test_a_peft_script(names: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    run(blocks("docs/getting-started.md")[0], names)
    train(names)
    assert names["attached"].steps == 5
    assert any("LoraKernels" in type(m).__name__ for m in names["model"].modules())


def test_a_loss_without_logits(names: dict[str, Any]) -> None:
    code = blocks("docs/getting-started.md")[1]
    run(code, names)
    hidden, weight, labels = (names[name] for name in ("hidden", "weight", "labels"))
    whole = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    assert names["loss"].item() == pytest.approx(whole.item(), rel=2**-4)  # e4m3 rounds to 2⁻⁴


def test_loading(names: dict[str, Any]) -> None:
    run(blocks("docs/adapters.md")[0], names)
    assert "LoRA on 14 modules" in str(names["report"])


def test_a_start_from_the_base(names: dict[str, Any]) -> None:
    run(blocks("docs/adapters.md")[1], names)
    weights = safetensors.torch.load_file("pissa-adapter/adapter_model.safetensors")
    ranks = {len(value) for key, value in weights.items() if ".lora_A." in key}
    assert ranks == {32}


def test_several_adapters(names: dict[str, Any]) -> None:
    names["french"], names["german"] = torch.randint(0, 64, (2, 1, 16))

    def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    names["loss_of"] = loss_of
    run(blocks("docs/adapters.md")[2], names)
    weights = safetensors.torch.load_file("de-adapter/adapter_model.safetensors")
    assert {len(value) for key, value in weights.items() if ".lora_A." in key} == {8}
    assert all(value.count_nonzero() for key, value in weights.items() if ".lora_B." in key)


def test_experts(names: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(vocab_size=64, **sizes, **heads)
    transformers.MixtralForCausalLM(config).save_pretrained("path/to/mixtral")
    run(blocks("docs/adapters.md")[3], names)
    assert "LoRA on 8 modules" in str(names["report"])
    assert Path("experts-adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "line", blocks("docs/adapters.md")[4].splitlines(), ids=lambda line: line.split("(")[0]
)
def test_saving(names: dict[str, Any], line: str) -> None:
    apply_lora(names["model"], LoRAConfig(target_modules="all-linear"))
    run(line, names)
    folder = re.findall(r'"([\w-]+)"', line)[0]
    assert list(Path(folder).glob("*.safetensors"))


def test_a_recipe(names: dict[str, Any]) -> None:
    run(blocks("docs/scales-and-dropout.md")[0], names)
    assert names["report"].fp8_state is None
    assert "base=e4m3 in blocks" in str(names["report"])


def test_fused_layers(names: dict[str, Any]) -> None:
    run(blocks("docs/fused-layers.md")[0], names)


ON_ONE_RANK = {
    '"nccl"': '"gloo"',
    '"cuda"': '"cpu"',
    "(4,)": "(1,)",
    "(8,)": "(1,)",
    "(1, 4)": "(1, 1)",
    "(2, 2)": "(1, 1)",
}


@pytest.fixture
def one_rank(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a block of docs/parallel.md finds beside a model: a group of one rank, and its earlier blocks' names."""
    _store, where = meet()
    for name, value in {**where, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    tokens = torch.arange(16)[None]
    config = LoRAConfig(r=4, target_modules="all-linear")
    found = {
        "config": config,
        "lora": config,
        "folder": "path/to/llama",
        "tokens": tokens,
        "labels": tokens,
    }
    yield {**names, **found, "fully_shard": fully_shard}
    if dist.is_initialized():
        dist.destroy_process_group()


def on_one_rank(block: int, names: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Run a block of docs/parallel.md with `names` and `more`, and return what it defined beside them."""
    code = blocks("docs/parallel.md")[block]
    for gpus, one in ON_ONE_RANK.items():
        code = code.replace(gpus, one)
    found = {**names, **more}
    exec(code, found)
    return found


def with_a_group(names: dict[str, Any]) -> dict[str, Any]:
    """`names` with a mesh over a group of one rank, and the model adapted."""
    apply_lora(names["model"], names["config"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    return {**names, "mesh": mesh, "shard_base": shard_base}


def test_a_sharded_base(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(0, one_rank)
    assert "transport gloo" in str(names["base"])


def test_an_offloaded_base(one_rank: dict[str, Any]) -> None:
    """Each line by itself, as they are three ways to the same. The first runs without a process group."""
    for line in blocks("docs/parallel.md")[1].splitlines():
        model = transformers.AutoModelForCausalLM.from_pretrained("path/to/llama")
        if "mesh" in line:
            names = with_a_group({**one_rank, "model": model})
        else:
            apply_lora(model, one_rank["config"])
            names = {**one_rank, "model": model, "shard_base": shard_base}
        exec(line, names)
        if "base" in names:
            assert "host" in str(names["base"])


def test_a_sharded_optimizer(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(2, with_a_group(one_rank))
    train(names)
    assert names["attached"].steps == 5


def test_tensor_parallel(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(3, one_rank)
    assert names["loss"].isfinite()


def test_saving_parts(one_rank: dict[str, Any], tmp_path: Path) -> None:
    names = {**on_one_rank(3, one_rank), "folder": tmp_path / "parts"}
    before = names["split"].whole_adapters()
    save, load = blocks("docs/parallel.md")[4].strip().splitlines()[-2:]
    exec("import torch.distributed.checkpoint as dcp\n" + save, names)
    with torch.no_grad():
        for parameter in names["model"].parameters():
            parameter.mul_(0 if parameter.requires_grad else 1)
    exec(load, names)
    after = names["split"].whole_adapters()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def tp_of(names: dict[str, Any]) -> dict[str, Any]:
    """`names` with a mesh of one rank, and what the block above has imported."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    others = {"parallelize": lorakernels.parallelize, "shard_base": shard_base}
    return {**names, **others, "mesh": mesh, "load_quantized": load_quantized, "fuse": fuse}


def test_parts_read_alone(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(5, tp_of(one_rank))
    assert "14 layers over 1 ranks" in str(names["split"]) or "vocabulary" in str(names["split"])


def test_a_sharded_base_beneath_parts(one_rank: dict[str, Any]) -> None:
    names = tp_of(one_rank)
    apply_lora(names["model"], names["config"])
    assert "transport gloo" in str(on_one_rank(6, names)["base"])


def test_layers_for_authors(one_rank: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    small = {"4096": "32", "14336": "48"}
    code = blocks("docs/parallel.md")[7]
    for width, less in small.items():
        code = code.replace(width, less)
    act, x = torch.nn.functional.silu, torch.randn(6, 2, 32)
    names = {**one_rank, "group": dist.group.WORLD, "x": x, "act": act}
    exec(code, names)
    assert names["h"].shape == (6, 2, 48) and names["y"].shape == (6, 2, 32)


def test_context_parallel(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(8, one_rank)
    assert names["loss"].isfinite()


def test_pipeline_parallel(one_rank: dict[str, Any]) -> None:
    tokens = torch.arange(16).expand(8, 16)
    names = on_one_rank(9, one_rank, tokens=tokens, labels=tokens)
    assert names["loss"].isfinite() and "1 stages over 1 ranks" in str(names["pipeline"])


def test_stages_of_shared_rows(one_rank: dict[str, Any]) -> None:
    tokens = torch.arange(16).expand(8, 16)
    report = apply_lora(one_rank["model"], one_rank["config"])
    dist.init_process_group("gloo")
    made = {"init_device_mesh": init_device_mesh, "report": report}
    names = on_one_rank(10, one_rank, **made, tokens=tokens, labels=tokens)
    assert names["loss"].isfinite() and names["pipeline"].context is names["context"]


def test_fsdp(one_rank: dict[str, Any]) -> None:
    names = on_one_rank(11, with_a_group(one_rank))
    tokens = names["tokens"]
    assert names["model"](tokens, labels=tokens).loss.isfinite()


def test_a_plan(names: dict[str, Any]) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    names["config"] = transformers.LlamaConfig(vocab_size=128256, **sizes, **heads)
    run(blocks("docs/plan.md")[0], names)
    assert len(names["plan"].saves) == 32


def test_graphs(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU over the graphs that tests/graphs/fake.py imitates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(
        lorakernels.graphs, "GraphManager", partial(managed, device=device, warmup_steps=2)
    )
    model, philox = names["model"].to(device).train(), PhiloxState(1, device)
    config = LoRAConfig(target_modules="all-linear", lora_dropout=0.1)
    names["report"] = apply_lora(model, config, rng_state=philox)
    trained = [p for p in model.parameters() if p.requires_grad]
    names |= {
        "philox": philox,
        "optimizer": torch.optim.SGD(trained, lr=0.1),
        "microbatches": torch.randint(64, (2, 2, 16), device=device),
    }
    before = [p.clone() for p in trained]
    run(blocks("graphs/README.md")[0], names)
    assert any(not torch.equal(p, q) for p, q in zip(before, trained, strict=True))
    assert names["manager"].phase == "recording" and names["manager"].warmup_steps == 2


CITING = ("lorakernels", "graphs", "csrc", "tests", "benchmarks", "docs", "examples")
IDS = r"([A-Z]\d{1,2}(?:(?:, | and )[A-Z]\d{1,2})*)"  # "T28", "H1 and H2"; no H100, no C7515
BEHIND_ITS_NAME = re.compile(rf"facts(?:\.md)?\]?(?:\([^)]*\))?,\s+{IDS}")
IN_BRACKETS = re.compile(rf"\({IDS}\)")


def test_every_fact_that_is_cited_exists_once() -> None:
    """Ids stand behind docs/facts.md's name, and alone in brackets where a text cites several."""
    facts = (ROOT / "docs/facts.md").read_text("utf-8")
    ids = re.findall(r"^\| ([A-Z]\d+) \|", facts, re.MULTILINE)
    assert len(ids) == len(set(ids))
    suffixes = {".py", ".h", ".cuh", ".cu", ".cpp", ".md"}
    sources = [p for f in CITING for p in (ROOT / f).rglob("*.*") if p.suffix in suffixes]
    letters = {name[0] for name in ids}
    cited: dict[str, list[str]] = {}
    for path in [*sources, *ROOT.glob("*.md")]:
        text = path.read_text("utf-8")
        alone = [name for name in IN_BRACKETS.findall(text) if name[0] in letters]
        for name in re.findall(r"[A-Z]\d+", " ".join([*BEHIND_ITS_NAME.findall(text), *alone])):
            cited.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert {"H37", "P9", "T28"} <= set(cited), "the patterns find those that are known"
    assert {name: paths for name, paths in cited.items() if name not in ids} == {}
