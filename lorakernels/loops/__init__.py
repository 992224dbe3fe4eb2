# SPDX-License-Identifier: Apache-2.0
"""Support for training loops written by others: each step's work is tied to their optimizer."""

from lorakernels.loops.attached import Attached, attach
from lorakernels.loops.rehearsal import rehearsal

__all__ = ["Attached", "attach", "rehearsal"]
