# SPDX-License-Identifier: Apache-2.0
"""Linear layers under torch.compile: one op each way, and its launches."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
