# SPDX-License-Identifier: Apache-2.0
"""A frozen base that is sharded over GPUs and host memory: its shards, memory slots and transports."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
