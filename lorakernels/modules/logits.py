# SPDX-License-Identifier: Apache-2.0
"""What models of transformers do to logits after their output head. A loss that computes logits itself does not."""

from __future__ import annotations

from typing import Any

# fields of a config by which logits are changed → values that change nothing
CHANGES = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
}


def change_of_logits(config: Any) -> str | None:
    """ "field = value" of a config by which the model changes its logits, or None."""
    for name, neutral in CHANGES.items():
        if (value := getattr(config, name, None)) not in neutral:
            return f"{name} = {value}"
    return None
