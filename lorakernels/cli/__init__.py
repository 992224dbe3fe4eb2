# SPDX-License-Identifier: Apache-2.0
"""The `lorakernels` command. A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`."""
