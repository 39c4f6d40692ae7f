# SPDX-License-Identifier: Apache-2.0
"""The tests: beside each other by what they test, with the engine harness in tests/engine."""
