# SPDX-License-Identifier: Apache-2.0
"""What launches csrc's kernels, where that is more than one call of the extension."""
