# SPDX-License-Identifier: Apache-2.0
"""Processes of a run."""
