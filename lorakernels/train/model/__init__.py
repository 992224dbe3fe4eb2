# SPDX-License-Identifier: Apache-2.0
"""The model of a run: loading it, its loss, and what is checked before it trains."""
