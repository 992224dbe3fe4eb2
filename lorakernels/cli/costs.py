# SPDX-License-Identifier: Apache-2.0
"""The cost of an op's slower implementation, as `lorakernels doctor` shows it."""

from __future__ import annotations

# {(op, implementation): its time ÷ the fastest implementation's}, the medians of what one H200 measured.
# `python benchmarks/report/costs.py` prints the table from benchmarks/results, and a test compares them.
SLOWER = {
    ("amax_and_scale_update", "torch"): 20.0,
    ("bias_dropout_add", "torch"): 1.5,
    ("transpose_fp8", "torch"): 9.5,
    ("fp8_grad_input", "cublaslt"): 1.1,
    ("fp8_linear_lora", "cublaslt"): 1.1,
    ("lora_grad_a", "torch"): 5.7,
    ("quantize_grad", "torch"): 9.1,
    ("quantize_lora_down", "torch"): 12.0,
    ("rms_norm_quantize", "torch"): 29.0,
    ("rms_norm_backward", "torch"): 16.0,
    ("rope_qkv", "torch"): 17.0,
    ("swiglu_quantize", "torch"): 19.0,
    ("swiglu_quantize_grad", "torch"): 34.0,
}
