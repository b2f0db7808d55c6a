# SPDX-License-Identifier: Apache-2.0
"""The kernel of `tools/ptx/README.md`, in a folder of its own: compiled text is kept until a file of its folder changes."""
