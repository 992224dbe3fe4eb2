# SPDX-License-Identifier: Apache-2.0
"""The `lorakernels` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`."""
