# SPDX-License-Identifier: Apache-2.0
"""What vLLM talks to: the connector, the block-aware manager, and `register`, the `vllm.general_plugins` entry point.

Imports nothing until it is asked to, so that `register` costs nothing in processes that have no use for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.block_aware_manager import BlockAwareEncoderCacheManager
    from connector.ec_connector import LMCacheNeuronECConnector

__all__ = ["BlockAwareEncoderCacheManager", "LMCacheNeuronECConnector", "register"]

CONNECTOR_NAME = "LMCacheNeuronECConnector"
MANAGER_NAME = "BlockAwareEncoderCacheManager"


def register() -> None:
    """Make the connector known to vLLM by name. Called in every process of vLLM; safe to call twice."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    if CONNECTOR_NAME not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(CONNECTOR_NAME, "connector.ec_connector", CONNECTOR_NAME)


def __getattr__(name: str) -> Any:
    if name == CONNECTOR_NAME:
        from connector.ec_connector import LMCacheNeuronECConnector

        return LMCacheNeuronECConnector
    if name == MANAGER_NAME:
        from connector.block_aware_manager import BlockAwareEncoderCacheManager

        return BlockAwareEncoderCacheManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
