# SPDX-License-Identifier: Apache-2.0
"""`python -m lorakernels` is the `lorakernels` command."""

import sys

from lorakernels.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
