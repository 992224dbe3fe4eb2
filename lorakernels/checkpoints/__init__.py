# SPDX-License-Identifier: Apache-2.0
"""Files of models and adapters: adapters in PEFT's format, checkpoints loaded straight into FP8, merged models."""

from lorakernels.checkpoints.export.model import Exported, check_export, export_model
from lorakernels.lazy import offer_submodules

offer_submodules(__name__)

__all__ = ["Exported", "check_export", "export_model"]
