# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made of checkpoints, tensor by tensor: no model is ever in memory."""

from lorakernels.checkpoints.export import Exported, check_export, export_model

__all__ = ["Exported", "check_export", "export_model"]
