# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made of checkpoints, tensor by tensor: no model is ever in memory."""

from lorakernels.checkpoints.export import Exported, export_model

__all__ = ["Exported", "export_model"]
