# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run and its learning rates."""
