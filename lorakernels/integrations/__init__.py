# SPDX-License-Identifier: Apache-2.0
"""Support for other libraries, one file each. Only that file imports the library, and no module imports the file."""
