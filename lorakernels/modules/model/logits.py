# SPDX-License-Identifier: Apache-2.0
"""What models of transformers do to logits after their output head. A loss that computes logits itself has to do it."""

from __future__ import annotations

from typing import Any

from lorakernels.values import LogitChange


def change_of_logits(config: Any) -> LogitChange | None:
    """What a model of this config does to its logits, or None. `config` is that of the model's text part.

    Read are `logits_scaling`, which divides them, `logit_scale`, which multiplies them, and `final_logit_softcapping`.
    """
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or None
    found = LogitChange(factor / divisor, cap)
    return None if found == LogitChange() else found
