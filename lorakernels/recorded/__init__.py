# SPDX-License-Identifier: Apache-2.0
"""The plain eager path: what an autograd node launches, recorded once a shape and launched again by one call of csrc.

An eager step of a small model is bound by the host: torch's dispatcher, questions asked at every call, and allocations.
A plan asks once. It comes from the ops themselves, so that nothing says a second time what runs:

    stand_in.py   tensors without memory, with which a node's own code is run: csrc writes down its launches
    plan.py       that list, where its memory lies, and what a run allocates
    node.py       the autograd Function that runs a forward's plan and a backward's
    function.py   the same for a function without a gradient
    forms.py      whether a call's tensors are like those that a plan took
    once.py       a backward that is not differentiated again
    routing.py    when the ops run instead: under compile, modes, hooks, transforms and profilers

In autograd/, the plan.py of linear/, compiled/ and decoder/ say what the plans of their nodes depend on. A
forward or a backward that needs torch to compute something has no plan, and runs by the ops. Examples are a trained
bias's gradient, a mask for each of several projections, and the check of an fp16 gradient for an overflow. The reports
of `apply_lora` and `fuse` say which forwards ran by plans, and why the others did not.
"""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
