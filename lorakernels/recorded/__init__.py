# SPDX-License-Identifier: Apache-2.0
"""The plain eager path: an autograd node's launches, recorded once a shape and launched again by one call of csrc.

An eager step of a small model is bound by the host: torch's dispatcher, checks at every call, and allocations.
A recording checks once. It comes from the ops themselves, so that no second place says what runs:

    stand_in.py   tensors without memory, with which a node's own code is run: csrc records its launches
    recording.py  that list, where its memory lies, and what a run allocates
    node.py       the autograd Function that runs a forward's recording and a backward's
    function.py   the same for a function without a gradient
    forms.py      whether a call's tensors are like those that a recording took
    once.py       a backward that is not differentiated again
    routing.py    when the ops run instead: under compile, modes, hooks, transforms and profilers

In autograd/, the recorded.py of linear/, compiled/ and decoder/ say what the recordings of their nodes depend on. A
forward or a backward that needs torch to compute something has no recording, and runs by the ops. Examples are a
trained bias's gradient, a mask for each of several projections, and an fp16 gradient's check for an overflow. Reports
of `apply_lora` and `fuse` say which forwards were recorded, and why the rest were not.
"""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
