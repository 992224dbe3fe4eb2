# SPDX-License-Identifier: Apache-2.0
"""The order of steps, which of them are captured, and which buffers they share. Pure Python."""
