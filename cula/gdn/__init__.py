# SPDX-License-Identifier: Apache-2.0
"""Level 0 of Gated DeltaNet: by the names existing code imports."""
