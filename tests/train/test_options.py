# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lorakernels.cli.finetune import add_arguments
from lorakernels.train.errors import OptionError
from lorakernels.train.options import FinetuneOptions, resolve

GIVEN = {"model": "m", "data": ["d"], "output": "o"}


def test_help_documents_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for item in fields(FinetuneOptions):
        assert "--" + item.name.replace("_", "-") in shown
        assert len(item.metadata["help"]) > 10


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
        ("learning-rate: 3", "unknown option 'learning-rate'"),
        ("r: true", "r must be of type int, got True"),
        ("lr: fast", "lr must be of type float, got 'fast'"),
        ("data: [1]", "data must be of type str, got 1"),
        ("fp8: 1", "fp8 must be of type bool, got 1"),
        ("- r", "must hold a mapping of option names, found list"),
        ("r: [", "is not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(OptionError) as caught:
        resolve({**GIVEN, "config": str(config)}, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r must be at least 1, got 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"lr": -1.0}, "lr must be positive and finite, got -1.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"weight_layout": "dual"}, "weight_layout must be one of single, both, got 'dual'"),
        ({"graphs": "all"}, "graphs must be one of auto, step, layer, got 'all'"),
        ({"output": None}, "output is missing"),
        ({"data": []}, "data is missing"),
        ({"demo": True}, "demo brings its own model and data"),
    ],
    ids=str,
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve({**GIVEN, **changes}, {})
    assert message in str(caught.value)


def test_example_config_is_valid() -> None:
    path = Path(__file__).parents[2] / "examples" / "finetune.yaml"
    assert (
        resolve({"config": str(path), "output": "o"}, {}).seq_len
        == yaml.safe_load(path.read_text())["seq_len"]
    )
