# SPDX-License-Identifier: Apache-2.0
"""Measurements of lorakernels beside its peers, by kind.

    ops/ layers/ models/ graphs/   scripts, one a benchmark; nothing imports them
    report/                        the pages' tables from the results
    lib/                           what the scripts share: timing, tables of results, processes, providers
    peers/                         the layers and models of others, and ours beside them
    results/GPU/                   what was measured

Imports go down this list only (tests/test_layering.py). A script puts the tree's root on sys.path before it imports
from this package, so that `python benchmarks/ops/bench_philox.py` runs wherever torch and lorakernels are.
"""
