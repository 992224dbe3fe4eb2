# SPDX-License-Identifier: Apache-2.0
"""Models and adapters as files: adapters in PEFT's format, loading straight into FP8, export of merged models."""

from lorakernels.checkpoints.export import Exported, check_export, export_model

__all__ = ["Exported", "check_export", "export_model"]
