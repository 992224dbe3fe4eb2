# SPDX-License-Identifier: Apache-2.0
"""What is done to a whole model: apply, report, merge, save."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
