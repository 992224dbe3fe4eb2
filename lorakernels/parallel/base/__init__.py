# SPDX-License-Identifier: Apache-2.0
"""One frozen base over several GPUs and the host: its blocks, where they lie, and how they come."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
