# SPDX-License-Identifier: Apache-2.0
"""State that outlives a step: FP8 scales and amax histories, Philox states, and the layers that traced ops look up."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
