# SPDX-License-Identifier: Apache-2.0
"""The change that models of transformers make to logits after their output head. A loss over logits has to make it."""

from __future__ import annotations

from typing import Any

from lorakernels.values import LogitChange


def change_of_logits(config: Any) -> LogitChange | None:
    """The change that a model of this config makes to its logits, or None. `config` belongs to the model's text part.

    It reads `logits_scaling`, which divides them, `logit_scale`, which multiplies them, and `final_logit_softcapping`.
    """
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or None
    change = LogitChange(factor / divisor, cap)
    return None if change == LogitChange() else change
