# SPDX-License-Identifier: Apache-2.0
"""Linear layers over a frozen weight, with an adapter or without one."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
