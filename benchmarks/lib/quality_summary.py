# SPDX-License-Identifier: Apache-2.0
"""quality.py's seeds become one row for each model and variant, which is judged by the bf16 base's."""

from __future__ import annotations

import math

from benchmarks.lib.quality_variants import REFERENCE
from benchmarks.lib.rows import Row

TOLERANCE = 0.005


def kind_of(variant: str, otherwise: str) -> str:
    return otherwise if variant.startswith("te") else "WRONG"


def summary(rows: list[Row]) -> list[Row]:
    """One row for each model and variant from those of its seeds, judged by the bf16 base's of the same model."""
    found: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["variant"]), []).append(row)
    return [_summed(of, found.get((model, REFERENCE), [])) for (model, _), of in found.items()]


def _summed(rows: list[Row], bf16: list[Row]) -> Row:
    """A mean too far above bf16's is WRONG if it is ours."""
    check = next((str(row["check"]) for row in rows if row["check"] != "ok"), "ok")
    losses, theirs = ([float(str(r["held-out loss"] or "nan")) for r in of] for of in (rows, bf16))
    mean, off = sum(losses) / len(losses), math.nan
    if check == "ok" and bf16:
        off = mean / (sum(theirs) / len(theirs))
        if {row["seed"] for row in rows} != {row["seed"] for row in bf16} or math.isnan(off):
            check = "not judged: bf16's has not run with the same seeds"
        elif {row["base"] for row in rows} != {bf16[0]["base"]}:
            check = f"WRONG: trained another base than {bf16[0]['base']}"
        elif not off <= 1 + TOLERANCE:
            kind = kind_of(str(rows[0]["variant"]), "missed")
            check = f"{kind}: more than {TOLERANCE:.1%} above bf16's"
    seconds = sum(float(str(row["seconds"] or 0)) for row in rows) / len(rows)
    return {
        **{name: rows[0][name] for name in ("model", "variant")},
        "check": check,
        "seeds": len(rows),
        **{name: rows[0][name] for name in ("steps", "base", "loss before")},
        "held-out loss": "" if math.isnan(mean) else round(mean, 5),
        "spread": "" if math.isnan(mean) else round(max(losses) - min(losses), 5),
        "÷ bf16": "" if math.isnan(off) else round(off, 5),
        "seconds": round(seconds, 1),
    }
