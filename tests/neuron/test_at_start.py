# SPDX-License-Identifier: Apache-2.0
"""What cannot work under vllm-neuron is said at start, with the value that is wrong and what to change."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from connector import assembly, vllm_neuron, vllm_versions
from connector.settings import SettingsError
from tests.neuron.contract_plugin import ContractWorker
from tests.neuron.engine import NeuronLoop, NeuronOptions, neuron_config
from tests.scheduler.items import WIDTH, Image
from tests.scheduler.runner import Told

PAIR: dict[str, Any] = {"local_disk": "file:///nowhere/", "max_local_disk_size": 0.01}


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    """`sys.modules`, and what the module under test has made of them, put back afterwards."""
    with mock.patch.dict(sys.modules):
        vars(vllm_neuron).pop("NeuronBlockCacheWorker", None)
        yield sys.modules
        vars(vllm_neuron).pop("NeuronBlockCacheWorker", None)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def plugin(modules: dict[str, ModuleType], worker: type | None) -> None:
    """A package `vllm_neuron` with the plugin's layout."""
    for name in ("vllm_neuron", "vllm_neuron.vllm", "vllm_neuron.vllm.worker", "vllm_neuron.vllm.worker.neuron_worker"):
        modules[name] = ModuleType(name)
        modules[name].__path__ = []  # type: ignore[attr-defined]
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    if worker is not None:
        modules["vllm_neuron.vllm.worker.neuron_worker"].NeuronWorker = worker  # type: ignore[attr-defined]


# -- The plugin itself ------------------------------------------------------------------------------------------------


def test_the_worker_class_is_made_over_the_plugins(modules: dict[str, ModuleType]) -> None:
    plugin(modules, ContractWorker)
    assert issubclass(vllm_neuron.NeuronBlockCacheWorker, ContractWorker)
    assert vllm_neuron.NeuronBlockCacheWorker is vllm_neuron.NeuronBlockCacheWorker


def test_vllm_finds_both_classes_by_the_names_that_users_give(modules: dict[str, ModuleType]) -> None:
    plugin(modules, ContractWorker)
    config = neuron_config(NeuronOptions(async_scheduling=True))
    assert config.scheduler_config.get_scheduler_cls() is vllm_neuron.NeuronAsyncScheduler
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert worker is vllm_neuron.NeuronBlockCacheWorker and issubclass(worker, ContractWorker)


def test_without_the_plugin_it_says_what_to_install(modules: dict[str, ModuleType]) -> None:
    with pytest.raises(ImportError, match=r"vllm_neuron is not installed here.*connector\.workers\.BlockCacheWorker"):
        _ = vllm_neuron.NeuronBlockCacheWorker


def test_of_another_revision_it_says_which_names_are_missing(modules: dict[str, ModuleType]) -> None:
    plugin(modules, None)
    with pytest.raises(ImportError, match=r"has no worker class at .*neuron_worker\.NeuronWorker"):
        _ = vllm_neuron.NeuronBlockCacheWorker


def test_a_package_that_the_plugin_lacks_is_named_itself(modules: dict[str, ModuleType]) -> None:
    """Not hidden behind "another revision": the plugin is there, and what it needs is not."""
    plugin(modules, None)
    missing = ModuleNotFoundError("No module named 'torch_neuronx'", name="torch_neuronx")
    with (
        mock.patch.object(vllm_neuron.importlib, "import_module", side_effect=missing),
        pytest.raises(ModuleNotFoundError, match="torch_neuronx"),
    ):
        _ = vllm_neuron.NeuronBlockCacheWorker


def test_a_device_cache_of_another_kind_is_an_error_that_names_what_it_lacks() -> None:
    class AnotherCache:
        buffer = torch.zeros(3, 8, WIDTH)

    class AnotherWorker(ContractWorker):
        def load_model(self, *args: Any, **kwargs: Any) -> None:
            self.model_runner = SimpleNamespace(encoder_cache=AnotherCache())

    worker = vllm_neuron.worker_class(AnotherWorker)(neuron_config(NeuronOptions()), None, Told(), 0, {})
    with pytest.raises(RuntimeError, match=r"AnotherCache without allocate, block_size, contains.*Drop --worker-cls"):
        worker.load_model()


# -- Roles and connectors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer"])
def test_half_of_a_pair_without_anything_to_share_is_refused(role: str) -> None:
    with pytest.raises(ValueError, match=f"ec_role {role} .*set ec_role to ec_both; for a pair set local_disk"):
        NeuronLoop(NeuronOptions(role=role))


def test_a_producer_is_asked_whether_it_is_the_only_engine(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    settings = {**PAIR, "local_disk": f"file://{tmp_path}/"}
    with NeuronLoop(NeuronOptions(role="ec_producer", settings=settings), tiers=None):
        pass
    assert "If this is the only engine, set ec_role to ec_both" in said.text


def test_a_producer_without_the_worker_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ec_producer takes --worker-cls connector\.vllm_neuron\."):
        NeuronLoop(NeuronOptions(role="ec_producer", hook=False, settings=PAIR))


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer"])
def test_prefix_caching_in_a_pair_is_refused(role: str) -> None:
    config = neuron_config(NeuronOptions(role=role, settings=PAIR))
    config.cache_config.enable_prefix_caching = True  # a vLLM of today turns a producer's off by itself
    with pytest.raises(ValueError, match=f"enable_prefix_caching is on .* {role}.*--no-enable-prefix-caching"):
        assembly.build_scheduler_side(config)


def test_prefix_caching_in_one_engine_is_fine() -> None:
    a = Image("a", 32)
    with NeuronLoop(NeuronOptions(prefix_caching=True)) as engine:
        engine.ask("1", a)
        engine.settle()
        engine.evict_device()
        engine.ask("2", a)
        assert engine.encoder_runs(a) == 1


def test_the_plugins_own_connector_with_our_flags_is_refused() -> None:
    config = neuron_config(NeuronOptions())
    config.ec_transfer_config.ec_connector = "NeuronNixlECConnector"
    worker = vllm_neuron.worker_class(ContractWorker)(config, None, Told(), 0, {})
    with pytest.raises(ValueError, match=r"names NeuronNixlECConnector.*or drop both flags"):
        worker.load_model()
    with (
        mock.patch.object(vllm_neuron.Scheduler, "__init__", lambda self: setattr(self, "vllm_config", config)),
        pytest.raises(ValueError, match=r"names NeuronNixlECConnector.*or drop both flags"),
    ):
        vllm_neuron.NeuronScheduler()


# -- Sizes ------------------------------------------------------------------------------------------------------------


def test_a_buffer_of_fewer_blocks_than_are_counted_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"has 8 blocks of 8 tokens, and the scheduler counts 9 of 8"):
        NeuronLoop(NeuronOptions(more_blocks=-1))


def test_more_blocks_than_are_counted_are_fine() -> None:
    with NeuronLoop(NeuronOptions(more_blocks=3)) as engine:
        engine.ask("1", Image("a"))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(9, 8, WIDTH + 1, dtype=torch.bfloat16), f"rows of {WIDTH + 1} columns, .* have {WIDTH}"),
        (torch.zeros(9, 8, WIDTH, dtype=torch.float32), r"holds torch.float32, .*Set --dtype to float32"),
    ],
)
def test_a_buffer_of_other_rows_than_are_stored_is_refused(buffer: torch.Tensor, message: str) -> None:
    with (
        mock.patch.object(vllm_versions, "encoder_cache_size", lambda _: 64),
        pytest.raises(SettingsError, match=message),
    ):
        assembly.build_plugin_copies(neuron_config(NeuronOptions()), buffer)


# -- One flag without the other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected", "unexpected"),
    [
        ({"hook": True, "counts_blocks": False}, "Add --scheduler-cls", "without --worker-cls"),
        ({"hook": False, "counts_blocks": True}, "without --worker-cls", "Add --scheduler-cls"),
        ({"hook": True, "counts_blocks": True}, None, "Add --scheduler-cls"),
        ({"hook": True, "counts_blocks": True}, None, "without --worker-cls"),
    ],
)
def test_one_flag_without_the_other_works_and_says_what_is_lost(
    flags: dict[str, bool], expected: str | None, unexpected: str, said: pytest.LogCaptureFixture
) -> None:
    with NeuronLoop(NeuronOptions(**flags)) as engine:
        engine.ask("1", Image("a"))
        engine.settle()
        engine.evict_device()
        engine.ask("2", Image("a"))
        assert engine.encoder_runs(Image("a")) == 1
    assert expected is None or expected in said.text
    assert unexpected not in said.text
