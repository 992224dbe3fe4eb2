# SPDX-License-Identifier: Apache-2.0
"""AdamW whose state is split over the ranks that train the same parameters."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
