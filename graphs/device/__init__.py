# SPDX-License-Identifier: Apache-2.0
"""Captures, launches and memory: on CUDA, or as the tests imitate them."""
