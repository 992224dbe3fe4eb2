# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that ops share, in plain PyTorch: dropout's masks, FP8 casts, products with one rounding."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
