# SPDX-License-Identifier: Apache-2.0
"""What eager iterations do: the order of the layers, what goes into them and comes out."""
