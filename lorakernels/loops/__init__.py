# SPDX-License-Identifier: Apache-2.0
"""Training loops that are not ours: what a step needs, tied to their optimizer."""

from lorakernels.loops.attached import Attached, attach

__all__ = ["Attached", "attach"]
