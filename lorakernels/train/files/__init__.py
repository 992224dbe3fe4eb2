# SPDX-License-Identifier: Apache-2.0
"""Files of a run: whole or absent, and read with their checks."""
