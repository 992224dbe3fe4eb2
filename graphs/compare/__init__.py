# SPDX-License-Identifier: Apache-2.0
"""Comparisons of a replay with its capture: the parts of a call, and the attributes of layers."""
