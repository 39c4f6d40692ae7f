# SPDX-License-Identifier: Apache-2.0
"""How vLLM finds the connector: by name through the plugin entry point, or by module path."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import connector


def _connector_class(**fields: str) -> type:
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    config = ECTransferConfig(ec_connector="LMCacheNeuronECConnector", ec_role="ec_both", **fields)
    found: type = ECConnectorFactory.get_connector_class(config)
    return found


def test_the_entry_point_registers_the_name_and_may_be_called_twice() -> None:
    (found,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "lmcache_neuron_ec"]
    register = found.load()
    register()
    register()
    assert _connector_class() is connector.LMCacheNeuronECConnector


def test_the_module_path_works_without_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    monkeypatch.setattr(ECConnectorFactory, "_registry", {})
    assert _connector_class(ec_connector_module_path="connector") is connector.LMCacheNeuronECConnector


def test_an_unknown_role_is_refused_by_name() -> None:
    from vllm.config import ECTransferConfig

    with pytest.raises(ValueError, match=r"ec_prodcer"):
        ECTransferConfig(ec_connector="LMCacheNeuronECConnector", ec_role="ec_prodcer")


def test_registering_imports_neither_lmcache_nor_the_tiers() -> None:
    """It runs in every process of vLLM, also in those that never see an encoder."""
    code = (
        "import sys, connector; connector.register(); "
        "print([name for name in ('lmcache', 'storage_tiers', 'connector.ec_connector') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchConnector"):
        _ = connector.NoSuchConnector
