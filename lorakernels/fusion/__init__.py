# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face decoder layer as three autograd nodes: `fuse` checks a model and rewires it, `unfuse` undoes that."""
