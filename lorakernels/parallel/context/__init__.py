# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the tokens of each row are split over ranks."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
