# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: the frozen FP8 base, kept once and not once a GPU."""
