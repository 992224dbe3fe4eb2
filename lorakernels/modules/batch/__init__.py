# SPDX-License-Identifier: Apache-2.0
"""Several adapters over one base in one batch."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
