# SPDX-License-Identifier: Apache-2.0
"""In which order steps run, which of them are captured, and which buffers they share. Pure Python."""
