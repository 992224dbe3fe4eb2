# SPDX-License-Identifier: Apache-2.0
"""Options of a run: their values, where these come from, and which do not go together."""
