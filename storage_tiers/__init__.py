# SPDX-License-Identifier: Apache-2.0
"""The storage hierarchy: shared CPU memory, local disk, remote stores.

Imports nothing from `connector` and nothing from vLLM.
"""
