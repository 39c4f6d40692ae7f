# SPDX-License-Identifier: Apache-2.0
"""The connector in real servers: `vllm serve`, real pictures, processes killed for real."""
