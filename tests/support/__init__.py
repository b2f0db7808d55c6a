# SPDX-License-Identifier: Apache-2.0
"""What the tests need to judge GPU code on a machine without a GPU."""
