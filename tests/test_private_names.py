# SPDX-License-Identifier: Apache-2.0
"""A name that begins with one underscore belongs to its file: other files use a public name, with a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lorakernels"
MODULE = "nn.Module's table or mark, for which torch has no public name"
TORCH = "torch has no public name for it"
NAMEDTUPLE = "public in a NamedTuple, which cannot have plain names beside its fields"
TE = "what Transformer Engine's Float8Tensor holds"
# Names of other libraries, with the reason why no public name does.
OTHERS = {
    "_parameters": MODULE,
    "_buffers": MODULE,
    "_modules": MODULE,
    "_forward_hooks": MODULE,
    "_forward_pre_hooks": MODULE,
    "_forward_pre_hooks_with_kwargs": MODULE,
    "_apply": TORCH,
    "_is_exporting_flag": TORCH,
    "_C": TORCH,
    "_ops": TORCH,
    "_op": "what an overload of torch's calls: its op in C++",
    "_dynamo_marked_constant": "torch.compiler.assume_constant_result imports all of Dynamo",
    "_version": TORCH,
    "_schema": TORCH,
    "_sequence_nr": TORCH,
    "_scaled_mm": TORCH,
    "_assert_async": TORCH,
    "_cdata": TORCH,
    "_get_backend": TORCH,
    "_init_handles": "Triton loads a kernel that was compiled by it",
    "_foreach_copy_": TORCH,
    "_foreach_mul_": TORCH,
    "_fused_sdp_choice": TORCH,
    "_flash_attention_forward": TORCH,
    "_scaled_dot_product_cudnn_attention": TORCH,
    "_scaled_dot_product_cudnn_attention_backward": TORCH,
    "_scaled_dot_product_flash_attention_for_cpu": TORCH,
    "_scaled_dot_product_flash_attention_for_cpu_backward": TORCH,
    "_replace": NAMEDTUPLE,
    "_fields": NAMEDTUPLE,
    "_field_defaults": NAMEDTUPLE,
    "_data": TE,
    "_scale_inv": TE,
    "_fp8_dtype": TE,
    "_getframe": "sys has no public name for it",
    "_exit": "os has no public name for it",
    "_enable_peft_forward_hooks": "PEFT has no public name for what it does around a call",
    "_register_custom_module": "PEFT's documented hook for custom layers",
    "_from_config": "transformers' constructor of a model class",
    "_attn_implementation": "transformers' setting, read from its config",
}
# Names that both torch and a file of ours have: only this file means torch's.
IN_FILE = {("autograd/bias_dropout_add.py", "_base"): "the tensor that a view is of"}
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    """Whether an attribute of `value` is an attribute of `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def defined(tree: ast.AST) -> set[str]:
    """Names that a file makes: functions, classes, variables, and attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_own(node.value)
        ):
            found.add(node.attr)
    return found


def reached(path: str, text: str) -> Iterator[str]:
    """Private names of other files that the file `path` uses, as `object._name` or by import."""
    tree = ast.parse(text)
    own = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            ours = node.level or (node.module or "").split(".")[0] == "lorakernels"
            yield from (a.name for a in node.names if ours and _is_reached(a.name))
        elif isinstance(node, ast.Attribute) and not is_own(node.value) and node.attr not in own:
            outer = ast.unparse(node.value).startswith("torch._C")
            if _is_reached(node.attr) and not outer and (path, node.attr) not in IN_FILE:
                yield ast.unparse(node)


def _is_reached(name: str) -> bool:
    return is_private(name) and name not in OTHERS


def test_a_file_uses_no_private_name_of_another() -> None:
    used = {path: list(reached(path, text)) for path, text in SOURCES.items()}
    assert {path: names for path, names in used.items() if names} == {}


def test_every_exception_is_needed() -> None:
    used = {
        (path, node.attr)
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
    }
    names = {name for _, name in used}
    assert set(OTHERS) <= names, f"no longer used: {sorted(set(OTHERS) - names)}"
    assert set(IN_FILE) <= used, f"no longer used: {sorted(set(IN_FILE) - used)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("layer._stored", ["layer._stored"]),
        ("layer._column = 1", ["layer._column"]),
        ("self.first._column", ["self.first._column"]),
        ("make()._base.shape", ["make()._base"]),
        ("from lorakernels.modules.x import _f, g", ["_f"]),
        ("from ._x import y", []),
        ("from lorakernels import _C", []),
        ("self._a, cls._b, super()._c()", []),
        ("class A:\n    def _f(self, other): return other._f", []),
        ("class A:\n    def f(self, other):\n        self._x = 1\n        return other._x", []),
        ("module._parameters, torch._C._autograd._f, x.__dict__", []),
    ],
    ids=[
        "read",
        "written",
        "of an attribute",
        "of a result",
        "imported",
        "a module of the package",
        "the extension",
        "its own",
        "a method of its file",
        "an attribute of its file",
        "torch's",
    ],
)
def test_the_check_itself(text: str, found: list[str]) -> None:
    assert list(reached("modules/x.py", text)) == found
