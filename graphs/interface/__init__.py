# SPDX-License-Identifier: Apache-2.0
"""The interface to a user: options, errors, reports."""
