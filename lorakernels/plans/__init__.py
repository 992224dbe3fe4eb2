# SPDX-License-Identifier: Apache-2.0
"""The plain eager path: what an autograd node launches, recorded once a shape and launched again by one call of csrc.

An eager step of a small model is bound by the host: torch's dispatcher, questions asked at every call, and allocations.
A plan asks once. It comes from the ops themselves, so that nothing says a second time what runs:

    stand_in.py   tensors without memory, with which a node's own code is run; csrc's LaunchList writes down its launches
    plan.py       that list, where its memory lies, and what a run allocates
    node.py       the autograd Function that runs a forward's plan and a backward's
    routing.py    when the ops run instead: under compile, modes, transforms and profilers

autograd/linear_plan.py and autograd/decoder_plan.py say what the plans of their nodes depend on. Anything of torch that
would compute (a trained bias's gradient, masks of several projections, fp16's check of an overflow) has no plan: such
a direction of a node runs by the ops.
"""
