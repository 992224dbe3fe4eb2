# SPDX-License-Identifier: Apache-2.0
"""Other libraries, one file each: a file imports its library, and nothing else imports the file."""
