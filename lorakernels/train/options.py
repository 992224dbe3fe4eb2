# SPDX-License-Identifier: Apache-2.0
"""Every option of ``lorakernels finetune``: its default, its help text and its check, each written once.

The command line, the YAML file and ``--help`` are made from this dataclass. Options of how a run updates, stops and
reports stand in ``running_options.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from lorakernels.train.errors import OptionError
from lorakernels.train.option_fields import about, option
from lorakernels.train.running_options import RunningOptions

DTYPES = ("auto", "float32", "bfloat16")
LAYOUTS = ("single", "both")
FORMATS = ("bf16", "fp8")
GRAPHS = ("auto", "step", "layer")
SAVE = ("full", "recompute", "fp8", "checkpoint")
ATTENTION = ("auto", "cudnn", "flash", "efficient", "math")
ALL_LINEAR = "all-linear"


@dataclass
class FinetuneOptions(RunningOptions):
    """Options of one run. ``check()`` raises for the first value that cannot work."""

    model: str | None = option(
        None,
        "input and output",
        "model directory: config.json, safetensors weights and tokenizer files; nothing is downloaded "
        "and no code from it is run",
        metavar="DIR",
    )
    demo: bool = option(
        False,
        "input and output",
        "train a small byte-level base on this Python's own sources first, then adapt it to the help texts of pydoc",
    )
    data: list[str] = field(
        default_factory=list,
        metadata=about(
            "input and output",
            "data files or folders: rows in .jsonl, .json, .csv, .tsv, .parquet or a folder of the datasets library, "
            "or UTF-8 text, one document each; .gz, .bz2, .xz and .zst are unpacked",
            metavar="FILE",
        ),
    )
    output: str | None = option(
        None,
        "input and output",
        "where adapter, checkpoints, metrics.jsonl and loss.png go; the demo's default is demo-output",
        metavar="DIR",
    )
    merge: str | None = option(
        None,
        "input and output",
        "also write the merged model to merged/ in the output directory, as lorakernels export does",
        choices=FORMATS,
    )
    resume: bool = option(
        False, "input and output", "go on from the newest good checkpoint in the output directory"
    )

    data_weights: list[float] = field(
        default_factory=list,
        metadata=about(
            "data",
            "how many times an epoch takes the documents of each entry of data; 0.5 takes half of them",
            metavar="WEIGHT",
        ),
    )
    eval_data: list[str] = field(
        default_factory=list,
        metadata=about(
            "data", "files or folders to evaluate on, instead of a part of data", metavar="FILE"
        ),
    )
    chat_template: str | None = option(
        None,
        "data",
        "Jinja file that writes chats, instead of the tokenizer's own chat template",
        metavar="FILE",
    )
    train_on_inputs: bool = option(
        False,
        "data",
        "the loss of chats and completions covers all tokens, also those of prompts, not the answers only",
    )
    skip_bad_rows: bool = option(
        False, "data", "count rows that cannot be used and leave them out, instead of stopping"
    )

    r: int = option(16, "adapter", "rank of the adapters")
    lora_alpha: float = option(
        32.0, "adapter", "scaling is lora_alpha / r (lora_alpha / sqrt(r) with use_rslora)"
    )
    lora_dropout: float = option(0.05, "adapter", "dropout on the input of lora_A, in [0, 1)")
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata=about(
            "adapter",
            "module names to adapt, by PEFT's rules; all-linear means every linear layer except the "
            "output head",
            metavar="NAME",
        ),
    )
    exclude_modules: list[str] = field(
        default_factory=list,
        metadata=about("adapter", "module names to leave alone", metavar="NAME"),
    )
    use_rslora: bool = option(False, "adapter", "rank-stabilised scaling")
    fp8: bool = option(
        True, "adapter", "hold the frozen base weights in FP8; --no-fp8 keeps them in dtype"
    )

    seq_len: int = option(
        1024, "optimisation", "tokens per packed sequence; longer documents are split"
    )
    isolate_documents: bool = option(
        True,
        "optimisation",
        "attention does not cross documents packed into one row; without it a row is causal as a whole, which on "
        "Hopper GPUs cuDNN's attention takes, faster unless --deterministic",
    )
    batch_size: int = option(4, "optimisation", "packed sequences per microbatch")
    grad_accum: int = option(1, "optimisation", "microbatches per optimizer step")
    steps: int | None = option(None, "optimisation", "optimizer steps; instead of epochs")
    epochs: float = option(
        1.0, "optimisation", "passes over the training data, when steps is not given"
    )
    lr: float = option(2e-4, "optimisation", "peak learning rate")
    min_lr_ratio: float = option(
        0.1, "optimisation", "learning rate at the last step, as a share of lr"
    )
    warmup: float = option(
        0.03, "optimisation", "warm-up: a share of all steps if below 1, else a number of steps"
    )
    weight_decay: float = option(
        0.0, "optimisation", "weight decay on matrices only, decoupled but for sgd"
    )
    beta1: float = option(
        0.9, "optimisation", "AdamW's decay of the first moment, and sgd's momentum"
    )
    beta2: float = option(0.95, "optimisation", "AdamW's decay of the second moment")
    max_grad_norm: float = option(
        1.0, "optimisation", "clip the gradient norm here; 0 turns clipping off"
    )
    max_bad_steps: int = option(
        10,
        "optimisation",
        "stop after this many steps in a row whose loss or gradient is not finite",
    )
    loss_chunk: int = option(
        2048,
        "optimisation",
        "tokens whose logits exist at the same time (2048 x 128256 bf16 logits are 0.5 GB)",
    )

    eval_fraction: float = option(
        0.05, "evaluation", "share of the tokens held out, whole documents where possible"
    )
    eval_every: int = option(
        100, "evaluation", "steps between evaluations; 0 evaluates only at start and end"
    )
    eval_rows: int = option(
        256, "evaluation", "packed sequences per evaluation, at most; 0 takes all"
    )

    save_every: int = option(
        100, "checkpoints and logs", "steps between checkpoints; 0 saves only at the end"
    )
    keep: int = option(2, "checkpoints and logs", "checkpoints kept")
    log_every: int = option(
        10, "checkpoints and logs", "steps between log lines when there is no terminal"
    )

    fuse: bool | None = option(
        None,
        "runtime",
        "rewire decoder layers into fused kernels where the model allows it; default: on a GPU",
    )
    eager: bool = option(
        False,
        "runtime",
        "launch every kernel anew instead of replaying CUDA graphs on a GPU; slower where the host bounds",
    )
    graphs: str = option(
        "auto",
        "runtime",
        "what one CUDA graph replays: step, a whole optimizer step, or layer, one direction of a decoder layer, which "
        "is slower by a little; auto is step on one GPU and layer on several",
        choices=GRAPHS,
    )
    save: str = option(
        "recompute",
        "runtime",
        "what a fused layer keeps for backward, from fastest to smallest",
        choices=SAVE,
    )
    memory_budget: float | None = option(
        None,
        "runtime",
        "GiB that fused layers may keep for backward together; chooses save layer by layer",
    )
    offload_activations: bool = option(
        False,
        "runtime",
        "keep in pinned host memory what is largest of --save fp8, gate and up, or the layer's input of --save "
        "checkpoint; with --memory-budget, where the budget asks for it",
    )
    layout: str = option(
        "given",
        "runtime",
        "auto: shard_base, offload and memory_budget are those of the fastest plan for this model, batch and GPUs, as "
        "`lorakernels plan` prints it; given: as the options say",
        choices=("given", "auto"),
    )
    attention: str = option(
        "auto",
        "runtime",
        "attention backend of fused layers",
        choices=ATTENTION,
    )
    shared_dropout: bool = option(
        True,
        "runtime",
        "one dropout mask for the adapters of q, k, v and one for those of gate, up in fused layers",
    )
    weight_layout: str = option(
        "single",
        "runtime",
        "both also holds the FP8 base transposed, one byte more per parameter, and spares backward its transpositions",
        choices=LAYOUTS,
    )
    shard_base: bool = option(
        False,
        "runtime",
        "under torchrun: the GPUs of a machine keep one copy of the FP8 base together, and each layer's weights are "
        "gathered while the layer before runs; the same numbers with less memory",
    )
    offload: float = option(
        0.0,
        "runtime",
        "keep at least this fraction of every layer's FP8 base in pinned memory of the host, and copy it to the GPU "
        "two layers ahead; the same numbers with less GPU memory",
        metavar="FRACTION",
    )
    fp8_head: bool = option(False, "runtime", "multiply by the output head in FP8 while training")
    seed: int = option(
        0, "machine", "seed of adapter values, dropout, data order and held-out split"
    )
    dtype: str = option(
        "auto", "machine", "dtype of the base; auto is bfloat16 on a GPU", choices=DTYPES
    )
    device: str = option(
        "auto", "machine", "cpu, cuda or cuda:N; auto takes the first GPU if there is one"
    )
    deterministic: bool = option(
        False,
        "machine",
        "on a GPU take only kernels that give the same bits every time, which a --resume to the bit needs; slower, by "
        "a sixth at Llama-3.1-8B's widths, as attention does without cuDNN and adds up in one order",
    )
    gradient_checkpointing: bool = option(
        False,
        "machine",
        "recompute activations in backward: less memory, slower; layers are not fused then, --save checkpoint does "
        "it fused",
    )

    def check(self) -> None:
        """Raise OptionError for the first value that cannot work."""
        if self.output is None:
            raise OptionError("output is missing: give --output DIR")
        if self.demo and (self.model or self.data or self.eval_data or self.chat_template):
            raise OptionError(
                "demo brings its own model and data: drop --demo, or drop --model, --data, --eval-data, --chat-template"
            )
        if not self.demo and not self.model:
            raise OptionError("model is missing: give --model DIR or --demo")
        if not self.demo and not self.data:
            raise OptionError("data is missing: give --data FILE...")
        self._check_data()
        for name in (
            "r",
            "seq_len",
            "batch_size",
            "grad_accum",
            "max_bad_steps",
            "loss_chunk",
            "keep",
            "log_every",
        ):
            self._bound(name, low=1)
        for name in (
            "weight_decay",
            "max_grad_norm",
            "eval_every",
            "eval_rows",
            "save_every",
            "warmup",
        ):
            self._bound(name, low=0)
        self._bound("seed", low=0, below=2**63)
        if self.demo and self.eval_fraction == 0:
            raise OptionError("the demo compares held-out losses: eval_fraction must not be 0")
        for name in ("lora_dropout", "beta1", "beta2", "eval_fraction"):
            self._bound(name, low=0, below=1)
        self._bound("min_lr_ratio", low=0, below=1.0000001)
        if self.steps is not None:
            self._bound("steps", low=1)
        for name in ("lr", "epochs", "lora_alpha"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.memory_budget is not None and not 0 < self.memory_budget < float("inf"):
            raise OptionError(
                f"memory_budget must be positive and finite, got {self.memory_budget}"
            )
        on_device = self.memory_budget is None and self.save in ("full", "recompute")
        if self.offload_activations and on_device and self.layout == "given":
            raise OptionError(
                f"offload_activations needs save fp8 or checkpoint, or a memory_budget, got save {self.save}"
            )
        if len(self.target_modules) > 1 and ALL_LINEAR in self.target_modules:
            others = ", ".join(name for name in self.target_modules if name != ALL_LINEAR)
            raise OptionError(
                f"target_modules: {ALL_LINEAR} stands alone, found it beside {others or 'itself'}"
            )
        for item in fields(self):
            allowed, value = item.metadata["choices"], getattr(self, item.name)
            for given in value if isinstance(value, list) else [value]:
                if allowed and given is not None and given not in allowed:
                    raise OptionError(
                        f"{item.name} must be one of {', '.join(allowed)}, got {given!r}"
                    )
        self.check_running(self.graphs)
        if (names := self.needs_held_out()) and not (self.eval_fraction or self.eval_data):
            raise OptionError(
                f"{names[0]} reads a held-out loss: eval_fraction is 0 and there is no eval_data"
            )
        if self.shard_base and self.demo:
            raise OptionError("shard_base is for --model: the demo's base is small")
        if self.shard_base and not self.fp8:
            raise OptionError("shard_base shards a base in FP8: drop --shard-base or --no-fp8")
        if self.shard_base and self.weight_layout != "single":
            raise OptionError(
                f"shard_base needs weight_layout single, got {self.weight_layout}: drop one of them"
            )
        if self.layout == "auto":
            self._check_planned()
        if not 0 <= self.offload < 1:
            raise OptionError(f"offload must be at least 0 and less than 1, got {self.offload}")
        if self.offload and (self.demo or not self.fp8 or self.weight_layout != "single"):
            raise OptionError(
                "offload is for an FP8 base of --model with weight_layout single: drop --offload, or --demo, --no-fp8 "
                "and weight_layout both"
            )
        if self.merge and self.model and _is_within(self.output, self.model):
            raise OptionError(f"merge: output {self.output} must not be inside model {self.model}")

    def _check_data(self) -> None:
        weights = self.data_weights
        if weights and len(weights) != len(self.data):
            raise OptionError(
                f"data_weights needs one weight for each entry of data: found {len(weights)} for {len(self.data)}"
            )
        if wrong := [weight for weight in weights if not 0 < weight < float("inf")]:
            raise OptionError(f"data_weights must be positive and finite, got {wrong[0]}")

    def _check_planned(self) -> None:
        """Options that a plan chooses, or does not know, must be as they are by default."""
        if self.demo:
            raise OptionError("layout auto is for --model: the demo's base is small")
        names = (
            "shard_base",
            "offload",
            "memory_budget",
            "save",
            "offload_activations",
            "weight_layout",
            "fp8",
            "fp8_head",
            "gradient_checkpointing",
        )
        default = FinetuneOptions()
        for name in names:
            if getattr(self, name) != getattr(default, name):
                raise OptionError(
                    f"layout auto plans with {name} {getattr(default, name)} or chooses it, got {getattr(self, name)}: "
                    "drop one of them"
                )
        if self.fuse is False or self.dtype == "float32":
            what = "--no-fuse" if self.fuse is False else "dtype float32"
            raise OptionError(f"layout auto plans fused layers in bfloat16: drop it or {what}")

    def _bound(self, name: str, *, low: float, below: float = float("inf")) -> None:
        value = getattr(self, name)
        if not low <= value < below:
            limit = "" if below == float("inf") else f" and below {below:g}"
            raise OptionError(f"{name} must be at least {low:g}{limit}, got {value}")


def _is_within(path: str | None, folder: str) -> bool:
    inner, outer = Path(str(path)).resolve(), Path(folder).resolve()
    return inner == outer or outer in inner.parents
