# SPDX-License-Identifier: Apache-2.0
"""Records of eager iterations: the order of the layers, their inputs and outputs."""
