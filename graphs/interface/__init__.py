# SPDX-License-Identifier: Apache-2.0
"""What a user sets and is told: options, errors, reports."""
