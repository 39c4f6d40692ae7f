# SPDX-License-Identifier: Apache-2.0
"""The connector in an engine that runs vllm-neuron, as far as its contract is known: stand-ins, faults included."""
