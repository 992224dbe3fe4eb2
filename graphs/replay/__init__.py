# SPDX-License-Identifier: Apache-2.0
"""Captured calls: what each replay checks, copies, launches and hands out."""
