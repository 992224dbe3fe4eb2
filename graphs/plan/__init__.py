# SPDX-License-Identifier: Apache-2.0
"""Which steps are captured, and which buffers they share. Pure Python."""
