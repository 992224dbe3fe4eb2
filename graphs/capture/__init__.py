# SPDX-License-Identifier: Apache-2.0
"""From a recorded block and its plan to graphs that can replay."""
