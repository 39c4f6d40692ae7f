# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what the product costs, beside what it is compared with, in one run. A slow run fails nothing."""
