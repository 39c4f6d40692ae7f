# SPDX-License-Identifier: Apache-2.0
"""The connector against vLLM's real scheduler, with a stand-in for the model runner; both halves in this process."""
