# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lorakernels.cli.finetune import add_arguments, unknown
from lorakernels.train.errors import OptionError
from lorakernels.train.files.yaml_text import load_yaml
from lorakernels.train.options.absent_names import ABSENT
from lorakernels.train.options.names import PEERS, near
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.sources import kinds, resolve

GIVEN = {"model": "m", "data": ["d"], "output": "o"}


def test_help_all_documents_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, every=True)
    shown = " ".join(parser.format_help().split())
    for item in fields(FinetuneOptions):
        assert "--" + item.name.replace("_", "-") in shown
        assert len(item.metadata["help"]) > 10
    for choices in (
        "{auto,step,layer}",
        "{auto,cudnn,flash,efficient,math,cudnn_graph,fp8}",
    ):
        assert choices in shown


def test_precedence_is_defaults_demo_file_command_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("demo: true\nr: 3\nlr: 2e-3\nsteps: 7\n")
    options = resolve(
        {"config": str(config), "output": "o", "r": 5}, {"steps": 1, "r": 2, "seq_len": 11}
    )
    assert (options.r, options.lr, options.steps, options.seq_len, options.seed) == (
        5,
        2e-3,
        7,
        11,
        0,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_alfa: 3", "unknown option 'lora_alfa'; did you mean lora_alpha?"),
        ("learning-rate: 3", "unknown option 'learning-rate'; did you mean lr?"),
        ("micro_batch_sise: 3", "unknown option 'micro_batch_sise'; did you mean batch_size"),
        ("weight-layout: both", "weight_layout: there is no such option any more, as a second, tr"),
        ("load_in_4bit: true", "unknown option 'load_in_4bit': there is no 4-bit or 8-bit base"),
        ("zzz: 3", "unknown option 'zzz'; known: attention, "),
        ("r: true", "r must be of type int, got True"),
        ("lr: fast", "lr must be of type float, got 'fast'"),
        ("data: [1]", "data must be of type str, got 1"),
        ("fp8: 1", "fp8 must be of type bool, got 1"),
        ("- r", "must hold a mapping of option names, found list"),
        ("r: [", "is not YAML"),
        ("lr: 1.0e-4\nr: 4\nlr: 2.0e-4", "found 'lr' twice in one mapping"),
        ("lora-alpha: 3\nlora_alpha: 4", "lora_alpha is given twice, once with a dash"),
        ("&a [*a]", "must hold a mapping of option names, found list"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(OptionError) as caught:
        resolve({**GIVEN, "config": str(config)}, {})
    assert message in str(caught.value)


def test_a_config_file_of_before_weight_layout_went_is_read(tmp_path: Path) -> None:
    """Every run goes as "single" went. Transposed copies are refused by name above."""
    config = tmp_path / "c.yaml"
    config.write_text("weight_layout: single\nr: 3\n")
    assert resolve({**GIVEN, "config": str(config)}, {}) == resolve({**GIVEN, "r": 3}, {})


def test_a_mapping_of_yaml_may_be_merged_with_several() -> None:
    """`<<` is no name: PyYAML takes all mappings that it brings, and what the mapping itself has comes first."""
    text = "a: &a {r: 1, lr: 2}\nb: &b {steps: 3}\nc:\n  <<: *a\n  <<: *b\n  r: 4\n"
    assert load_yaml(text)["c"] == {"r": 4, "lr": 2, "steps": 3}
    with pytest.raises(yaml.YAMLError, match="found '<<' twice"):
        load_yaml("{'<<': 1, '<<': 2}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r must be at least 1, got 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"lr": -1.0}, "lr must be positive and finite, got -1.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"graphs": "all"}, "graphs must be one of auto, step, layer, got 'all'"),
        (
            {"save": "none"},
            "save must be one of full, recompute, fp8, checkpoint, got 'none'",
        ),
        (
            {"attention": "flahs"},
            "attention must be one of auto, cudnn, flash, efficient, math, cudnn_graph, fp8, got",
        ),
        (
            {"attention": "fp8"},
            "attention fp8 needs rows that are causal as a whole, which cuDNN's FP8 takes alone: give "
            "--no-isolate-documents",
        ),
        ({"offload_activations": True}, "needs save fp8 or checkpoint, or a memory_budget, got"),
        ({"memory_budget": float("inf")}, "memory_budget must be positive and finite, got inf"),
        ({"memory_budget": float("nan")}, "memory_budget must be positive and finite, got nan"),
        (
            {"target_modules": ["all-linear", "lm_head"]},
            "target_modules: all-linear stands alone, found it beside lm_head",
        ),
        ({"output": None}, "output is missing: give --output DIR"),
        ({"data": []}, "data is missing: give --data FILE..."),
        (
            {"model": None, "data": [], "output": None},
            "model, data and output are missing: give --model DIR --data FILE... --output DIR, or --demo",
        ),
        ({"shard_base": True, "fp8": False}, "shard_base shards a base in FP8"),
        ({"shard_embeddings": True}, "shard_embeddings splits embedding and head as shard_base"),
        ({"offload": 1.0}, "offload must be at least 0 and below 1, got 1.0"),
        ({"offload": 0.3, "fp8": False}, "offload is for an FP8 base"),
        ({"fp8_recipe": "rows"}, "fp8_recipe must be one of delayed, block, got 'rows'"),
        ({"fp8_recipe": "block", "fp8": False}, "fp8_recipe block is for a base in FP8"),
        ({"eager": True, "graphs": "step"}, "eager replays no graphs, and graphs step asks for"),
        ({"eager": True, "graphs": "layer"}, "eager replays no graphs, and graphs layer asks for"),
        (
            {"fuse": True, "gradient_checkpointing": True},
            "gradient_checkpointing recomputes whole layers, which are not fused then: drop it or --fuse",
        ),
        ({"use_dora": True, "merge": "bf16"}, "use_dora does not go with merge"),
        ({"use_dora": True, "fuse": True}, "use_dora does not go with fuse"),
        ({"cp": 0}, "cp must be at least 1, got 0"),
        ({"cp": 3}, "seq_len must be a multiple of 6 with cp 3, got 1024"),
        ({"cp": 2, "attention": "cudnn"}, "efficient, math or cudnn_graph with cp, got cudnn"),
        (
            {"cp": 2, "attention": "cudnn_graph", "deterministic": True},
            "attention cudnn_graph has no fixed order of sums with cp",
        ),
        (
            {"cp": 2, "graphs": "step"},
            "cp replays layers, not whole steps: take graphs layer or auto",
        ),
        ({"cp": 2, "layout": "auto"}, "layout auto plans with cp 1 or chooses it, got 2"),
        ({"cp": 2, "jobs": "j", "data": [], "lora_dropout": 0.0}, "cp must be 1 with jobs, got 2"),
        ({"demo": True}, "demo brings its own model and data"),
        (
            {"demo": True, "model": None, "data": [], "eval_data": ["f"]},
            "demo brings its own model and data",
        ),
        (
            {"data": ["a", "b"], "data_weights": [1.0]},
            "data_weights needs one weight for each entry of data: found 1 for 2",
        ),
        ({"data_weights": [float("nan")]}, "data_weights must be positive and finite, got nan"),
    ],
    ids=str,
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve({**GIVEN, **changes}, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"fuse": True, "gradient_checkpointing": True},
        {"eager": True, "graphs": "layer"},
    ],
    ids=str,
)
def test_a_run_that_began_with_options_without_effect_goes_on(given: dict[str, object]) -> None:
    """They may not change, or runtime.py's advice is to add `--eager`."""
    assert resolve({**GIVEN, **given, "resume": True}, {}).resume


def test_yaml_reads_the_word_of_the_ordinary_start_as_a_truth_value(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    for text in ("true", "'true'"):
        config.write_text(f"init_lora_weights: {text}")
        assert resolve({**GIVEN, "config": str(config)}, {}).init_lora_weights == "true"


@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_a_data_folder_must_not_hold_the_output(tmp_path: Path, name: str) -> None:
    """The token files and metrics there would be read as rows. What a run does not read may lie there."""
    (tmp_path / "link").symlink_to(tmp_path)
    given = {**GIVEN, name: [str(tmp_path / "link")]}
    for output in (tmp_path, tmp_path / "a" / "out"):
        with pytest.raises(OptionError, match=f"{name}: the folder .*link holds output .*, whose"):
            resolve({**given, "output": str(output)}, {})
    file = {**GIVEN, name: [str(tmp_path / "a.jsonl")], "output": str(tmp_path)}
    assert resolve(file, {}).output == str(tmp_path)
    assert resolve({**given, "output": str(tmp_path / ".out")}, {})
    (tmp_path / "state.json").write_text("{}")
    assert resolve({**given, "output": str(tmp_path / "out")}, {})


def test_example_config_is_valid() -> None:
    path = Path(__file__).parents[2] / "examples" / "finetune.yaml"
    assert (
        resolve({"config": str(path), "output": "o"}, {}).seq_len
        == yaml.safe_load(path.read_text())["seq_len"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning-rate 1e-3", "unknown option --learning-rate; did you mean --lr?"),
        ("--num-train-epochs=3", "unknown option --num-train-epochs; did you mean --epochs?"),
        ("--lora_r 8", "unknown option --lora_r; did you mean --r?"),
        ("--lora_alpha 8", "unknown option --lora_alpha; did you mean --lora-alpha?"),
        ("8 --micro-batch-size 2", "unknown option --micro-batch-size; did you mean --batch-size?"),
        ("--max-seq-lenght 9", "unknown option --max-seq-lenght; did you mean --seq-len?"),
        ("--no-fusee", "unknown option --no-fusee; did you mean --no-fuse"),
        ("--no-cuda", "unknown option --no-cuda; did you mean --device?"),
        ("--konfig a", "unknown option --konfig; did you mean --config?"),
        ("--zzz", "unknown option --zzz; see --help-all"),
        (
            "--load-in-4bits",
            "unknown option --load-in-4bits: there is no 4-bit or 8-bit base; the base is in FP8",
        ),
        ("--bits 4", "unknown option --bits: there is no 4-bit or 8-bit base; the base is in FP8"),
        ("--packing", "unknown option --packing: rows are always packed"),
        ("--no-packing", "unknown option --no-packing: rows are always packed"),
        ("--push_to_hub", "unknown option --push_to_hub: nothing is uploaded"),
        (
            "--per_device_eval_batch_size=2",
            "unknown option --per_device_eval_batch_size; did you mean --batch-size?",
        ),
        ("--report_to wandb", "unknown option --report_to; did you mean --logger?"),
        (
            "--weight-layout both",
            "--weight-layout: there is no such option any more, as a second, ",
        ),
        ("false", "unexpected argument 'false': a switch takes no value"),
    ],
)
def test_unknown_words_are_answered_with_the_option_that_was_meant(
    words: str, message: str
) -> None:
    said = unknown(words.split())
    assert said.startswith(message) and "\n" not in said


def test_an_option_that_a_command_does_not_have_is_not_suggested() -> None:
    assert near("learning_rate", ["model", "output"]) == []
    assert near("output_dir", ["model", "output"]) == ["output"]


def test_peers_names_stand_for_options_and_are_none_themselves() -> None:
    names = [peer for peers in PEERS.values() for peer in peers]
    assert set(PEERS) <= set(kinds()) and not {*names, *ABSENT} & set(kinds())
    assert len(names) == len(set(names)) and not set(ABSENT) & set(names)


@pytest.mark.parametrize(
    "names",
    ["q_proj,v_proj", "q_proj, v_proj", ["q_proj,", "v_proj"], ["q_proj", "v_proj"]],
    ids=["commas", "commas and spaces", "words with commas", "a list"],
)
@pytest.mark.parametrize("option", ["target_modules", "exclude_modules", "target_parameters"])
def test_commas_separate_names(tmp_path: Path, option: str, names: str | list[str]) -> None:
    """On the command line each word is an item; in YAML a string is the only item."""
    words = names if isinstance(names, list) else [names]
    assert getattr(resolve({**GIVEN, option: words}, {}), option) == ["q_proj", "v_proj"]
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({option: names}))
    options = resolve({**GIVEN, "config": str(config)}, {})
    assert getattr(options, option) == ["q_proj", "v_proj"]


def test_choices_of_attention_are_those_of_fuse() -> None:
    from lorakernels.autograd.attention.choose import BACKENDS
    from lorakernels.fusion.memory import SAVE
    from lorakernels.train.options import values

    assert ("auto", *BACKENDS) == values.ATTENTION
    assert values.SAVE == SAVE
