# SPDX-License-Identifier: Apache-2.0
"""What a replay compares with its capture: a call taken apart, and the attributes of layers."""
