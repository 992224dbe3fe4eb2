# SPDX-License-Identifier: Apache-2.0
# graphs/ is installed as lorakernels.graphs. mypy reads the tree, where it is a package of its own: this joins the two.
from graphs import *  # noqa: F403
