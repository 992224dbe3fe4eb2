# SPDX-License-Identifier: Apache-2.0
"""StepGraph: a whole training step as one graph."""
