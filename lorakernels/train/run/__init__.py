# SPDX-License-Identifier: Apache-2.0
"""Steps of a run, and what is kept, logged and shown of them."""
