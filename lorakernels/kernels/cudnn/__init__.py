# SPDX-License-Identifier: Apache-2.0
"""Kernels of cuDNN that torch does not offer, through the graphs of `nvidia-cudnn-frontend`."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
