# SPDX-License-Identifier: Apache-2.0
"""The options of a run, which check themselves."""

from __future__ import annotations

from dataclasses import dataclass

from lorakernels.train.options.checks import check_options
from lorakernels.train.options.values import OptionValues


@dataclass
class FinetuneOptions(OptionValues):
    """Options of one run. ``check()`` raises for the first value that cannot work."""

    def check(self) -> None:
        """Raise OptionError for the first value that cannot work."""
        check_options(self)
