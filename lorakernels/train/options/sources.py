# SPDX-License-Identifier: Apache-2.0
"""The values of a run's options and where they come from.

The command line wins over the YAML file, the YAML file over the demo's defaults, and these over the ordinary defaults.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from lorakernels.train.errors import OptionError, require
from lorakernels.train.files.yaml_text import load_yaml
from lorakernels.train.options.absent_names import ABSENT
from lorakernels.train.options.fields import names_of
from lorakernels.train.options.names import GONE, near, why_absent
from lorakernels.train.options.options import FinetuneOptions

Kind = tuple[type, bool, bool]
LISTS_OF_NAMES = {"target_modules", "exclude_modules", "target_parameters", "logger"}


def kinds() -> dict[str, Kind]:
    """{name: (scalar type, is a list, may be None)}."""
    hints = typing.get_type_hints(FinetuneOptions)
    kind_of: dict[str, Kind] = {}
    for item in fields(FinetuneOptions):
        hint = hints[item.name]
        optional = isinstance(hint, types.UnionType)
        if optional:
            hint = next(a for a in typing.get_args(hint) if a is not type(None))
        is_list = typing.get_origin(hint) is list
        kind_of[item.name] = (typing.get_args(hint)[0] if is_list else hint, is_list, optional)
    return kind_of


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _scalar(name: str, value: Any, kind: type, source: str) -> Any:
    if kind is str and isinstance(value, bool) and name == "init_lora_weights":
        return str(value).lower()  # YAML reads the option's own word, true, as a truth value
    good = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if good:
        return value
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 2e-4 as a string
            return float(value)
        except ValueError:
            pass
    raise OptionError(f"{source}: {name} must be of type {kind.__name__}, got {value!r}")


def _typed(name: str, value: Any, kind: Kind, source: str) -> Any:
    scalar, is_list, optional = kind
    if value is None and optional:
        return None
    if is_list:
        items = value if isinstance(value, list) else [value]
        return [_scalar(name, item, scalar, source) for item in items]
    return _scalar(name, value, scalar, source)


def read_yaml(path: str) -> dict[str, Any]:
    """Read a flat mapping of option names.

    Raises:
        OptionError: the file cannot be read, a type is wrong, or a name is unknown; the message suggests near names.
            Or an option that is gone has another value than every run has now.
    """
    yaml = require("yaml")
    try:
        loaded = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise OptionError(
            f"{path} must hold a mapping of option names, found {type(loaded).__name__}"
        )
    options = kinds()
    values = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name in GONE and value != GONE[name].now:
            raise OptionError(f"{path}: {name}: {GONE[name]}, got {value!r}: drop it")
        if name in GONE:
            continue
        if name not in options:
            raise OptionError(f"{path}: unknown option {key!r}{_hint(name, options)}")
        if name in values:
            raise OptionError(f"{path}: {name} is given twice, once with a dash: leave one out")
        values[name] = _typed(name, value, options[name], path)
    return values


def _hint(name: str, options: Collection[str]) -> str:
    if why := why_absent(name, options, ABSENT):
        return f": {why}"
    meant = near(name, options)
    return (
        f"; did you mean {' or '.join(meant)}?"
        if meant
        else f"; known: {', '.join(sorted(options))}"
    )


def resolve(arguments: Mapping[str, Any], demo_defaults: Mapping[str, Any]) -> FinetuneOptions:
    """Merge the sources of options and check the result. ``arguments`` are those of the command line.

    Raises:
        OptionError: an option is unknown, of the wrong type or out of range.
    """
    arguments = dict(arguments)
    config = arguments.pop("config", None)
    values = read_yaml(config) if config else {}
    values.update(arguments)
    for name in LISTS_OF_NAMES & set(values):
        values[name] = names_of(values[name])
    if values.get("demo"):
        values = {**demo_defaults, **values}
    options = FinetuneOptions(**values)
    options.check()
    return options
