# SPDX-License-Identifier: Apache-2.0
"""What families and backends share: descriptions of calls, checks, the choice of a backend, operators, pools, replay."""
