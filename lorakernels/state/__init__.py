# SPDX-License-Identifier: Apache-2.0
"""What outlives a step: FP8 scales and amax histories, Philox states, and the layers that traced ops look up."""
