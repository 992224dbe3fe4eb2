# SPDX-License-Identifier: Apache-2.0
"""GraphManager: the layers of a training loop as graphs."""
