# SPDX-License-Identifier: Apache-2.0
"""Options of how a run updates its adapters, when it evaluates and stops, and to whom it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lorakernels.train.errors import OptionError
from lorakernels.train.files.unique_names import NameTwice, load_json
from lorakernels.train.options.fields import about, option

# These take the learning rate from the device and skip a bad step there, so that a graph of a whole step holds them.
CAPTURED_OPTIMS = ("adamw_torch_fused", "sgd")
OPTIMS = (*CAPTURED_OPTIMS, "adamw_torch", "adamw_8bit", "adafactor")
OWN_SCHEDULE = "cosine_with_min_lr"
SCHEDULES = (
    OWN_SCHEDULE, "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "warmup_stable_decay",
)  # fmt: skip
LOGGERS = ("tensorboard", "wandb", "trackio")
ON_DIVERGENCE = ("stop", "rollback")


@dataclass
class RunningOptions:
    """The part of FinetuneOptions that says how a run updates, evaluates, stops and reports."""

    optim: str = option(
        CAPTURED_OPTIMS[0],
        "optimisation",
        "optimizer, by the names of transformers' TrainingArguments; the first two run inside of a graph of the whole "
        "step, and adamw_8bit needs bitsandbytes",
        choices=OPTIMS,
    )
    loraplus_lr_ratio: float = option(
        1.0,
        "optimisation",
        "LoRA+: the learning rate of lora_B, and of vectors that are trained, is this many times lr",
    )
    lr_scheduler_type: str = option(
        OWN_SCHEDULE,
        "optimisation",
        "learning rate after the warm-up; the first is this package's own and goes down to min_lr_ratio, which the "
        "others, transformers', do not read",
        choices=SCHEDULES,
    )
    lr_scheduler_kwargs: str | None = option(
        None,
        "optimisation",
        "more arguments of a scheduler of transformers, as JSON",
        metavar="JSON",
    )
    on_divergence: str = option(
        "stop",
        "optimisation",
        "after max_bad_steps: stop, or rollback to the newest checkpoint before them and go on without their rows, "
        "twice at most",
        choices=ON_DIVERGENCE,
    )

    eval_every_sequences: int = option(
        0,
        "evaluation",
        "packed sequences between evaluations, instead of eval_every; 0 counts steps",
    )
    load_best_model_at_end: bool = option(
        False,
        "evaluation",
        "keep a checkpoint of the lowest held-out loss, whatever keep says, and write that one as the adapter",
    )
    early_stopping_patience: int = option(
        0,
        "evaluation",
        "stop after this many evaluations in a row that are no better than the best; 0 never stops early",
    )
    early_stopping_threshold: float = option(
        0.0,
        "evaluation",
        "by how many nats an evaluation must be lower than the best to count as better",
    )
    target_loss: float | None = option(
        None,
        "evaluation",
        "stop at the first evaluation with this held-out loss or a lower one, and record the time and the sequences",
    )

    logger: list[str] = field(
        default_factory=list,
        metadata=about(
            "checkpoints and logs",
            "where else the metrics go; each needs its own package",
            choices=LOGGERS,
        ),
    )
    run_name: str | None = option(
        None,
        "checkpoints and logs",
        "name of the run in the loggers; default: the name of the output directory",
        metavar="NAME",
    )

    def check_running(self, graphs: str) -> None:
        """Raise OptionError for the first of these values that cannot work. `graphs` is the option of that name."""
        if graphs == "step" and self.optim not in CAPTURED_OPTIMS:
            raise OptionError(
                f"graphs step captures {' or '.join(CAPTURED_OPTIMS)}, found optim {self.optim}: take graphs layer or "
                "auto"
            )
        if not 0 < self.loraplus_lr_ratio < float("inf"):
            raise OptionError(
                f"loraplus_lr_ratio must be positive and finite, got {self.loraplus_lr_ratio}"
            )
        if self.target_loss is not None and not 0 < self.target_loss < float("inf"):
            raise OptionError(f"target_loss must be positive and finite, got {self.target_loss}")
        for name in ("eval_every_sequences", "early_stopping_patience", "early_stopping_threshold"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be at least 0, got {getattr(self, name)}")
        if len(set(self.logger)) < len(self.logger):
            raise OptionError(f"logger names one twice: {', '.join(self.logger)}")
        self.scheduler_arguments()

    def scheduler_arguments(self) -> dict[str, Any]:
        """lr_scheduler_kwargs as a mapping.

        Raises:
            OptionError: it is no JSON object, or the schedule takes none.
        """
        text = self.lr_scheduler_kwargs
        if text is None:
            return {}
        try:
            arguments = load_json(text)
        except NameTwice as error:
            raise OptionError(f"lr_scheduler_kwargs: {error}") from error
        except ValueError as error:
            raise OptionError(f"lr_scheduler_kwargs is not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise OptionError(f"lr_scheduler_kwargs must be a JSON object, got {text}")
        if self.lr_scheduler_type in (OWN_SCHEDULE, "constant", "constant_with_warmup"):
            raise OptionError(
                f"lr_scheduler_kwargs: {self.lr_scheduler_type} takes none, found {', '.join(arguments) or text}"
            )
        return arguments

    def needs_held_out(self) -> list[str]:
        """Names of the options that were set and that read a held-out loss."""
        names = ("load_best_model_at_end", "early_stopping_patience")
        enabled = [name for name in names if getattr(self, name)]
        return enabled + ["target_loss"] * (self.target_loss is not None)
