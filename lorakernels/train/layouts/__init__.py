# SPDX-License-Identifier: Apache-2.0
"""A model over several GPUs: how it is split, and what each rank saves of it."""
