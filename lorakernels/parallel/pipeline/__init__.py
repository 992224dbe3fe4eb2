# SPDX-License-Identifier: Apache-2.0
"""A model over ranks by depth: stages, and the schedule that runs them."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
