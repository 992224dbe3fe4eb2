# SPDX-License-Identifier: Apache-2.0
"""Support for training loops written by others: each step's work is tied to their optimizer."""

from lorakernels.lazy import offer_submodules
from lorakernels.loops.attached import Attached, attach
from lorakernels.loops.rehearsal import rehearsal

offer_submodules(__name__)

__all__ = ["Attached", "attach", "rehearsal"]
