# SPDX-License-Identifier: Apache-2.0
"""The worker hook at its seams: both of vLLM's runners, a hash that is freed and loaded at once, engines without it."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from connector import workers
from connector.block_geometry import geometry_of
from connector.settings import BehaviourSettings, SettingsError
from connector.workers import install_block_mapping, run_plan
from storage_tiers.block_mapping import BlockMapping
from tests.engine.checkpoint import checkpoint
from tests.engine.server import ROOT
from tests.scheduler.engine_loop import EngineLoop, EngineOptions, vllm_config
from tests.scheduler.items import DTYPE, WIDTH, Image
from tests.scheduler.test_blocks_in_engine import MANAGER, options

CPU = torch.device("cpu")
BUDGET = SimpleNamespace(encoder_cache_size=64)
BLOCKS = EngineOptions(settings={"device_block_size": 4})


def rows(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def test_the_v1_runners_dict_is_replaced() -> None:
    runner = SimpleNamespace(encoder_cache={}, mm_budget=BUDGET)
    mapping = install_block_mapping(vllm_config(BLOCKS), runner, CPU)
    assert runner.encoder_cache is mapping
    runner.encoder_cache["tmp_0"] = rows(64)
    assert mapping is not None and mapping.blocks is not None
    assert mapping.blocks.num_blocks == 17


def test_invariant_14_the_v2_runner_and_its_connector_wrapper_share_the_mapping() -> None:
    """Over vLLM's own classes: the runner writes, the wrapper saves what is new, the runner frees and resets."""
    v2_connector = pytest.importorskip(
        "vllm.v1.worker.gpu.ec_connector", reason="this vLLM's V2 runner has no connector wrapper"
    )
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

    saved: list[str] = []
    transfer = mock.create_autospec(
        workers.LMCacheNeuronECConnector, instance=True, is_producer=True, is_consumer=False
    )
    transfer.get_finished.return_value = (None, None)
    transfer.save_caches.side_effect = lambda encoder_cache, mm_hash: saved.append(mm_hash)
    config, cache = vllm_config(BLOCKS), EncoderCache()
    with mock.patch.object(v2_connector, "get_ec_transfer", lambda: transfer):
        wrapper = v2_connector.ActiveECConnector(config, cache.encoder_outputs)
    runner: Any = SimpleNamespace(encoder_cache=cache, ec_connector=wrapper, mm_budget=BUDGET)
    mapping = install_block_mapping(config, runner, CPU)
    assert isinstance(mapping, BlockMapping)
    cache.encoder_outputs.update((f"tmp_{number}", rows(64, number)) for number in range(3))  # the profiling run
    cache.reset_encoder_cache()
    assert len(cache) == 0
    with wrapper.maybe_get_output(SimpleNamespace(ec_connector_metadata=object(), finished_req_ids=set())):
        cache.encoder_outputs["a"] = rows(9)
    assert saved == ["a"]
    assert torch.equal(cache.encoder_outputs["a"], rows(9))
    assert mapping.blocks is not None and mapping.blocks.contains("a")
    cache.free_encoder_cache("a")
    assert mapping.blocks.num_active_blocks == 0


@pytest.mark.parametrize(
    ("runner", "connector_name"),
    [
        (SimpleNamespace(encoder_cache={}, mm_budget=None), "LMCacheNeuronECConnector"),
        (SimpleNamespace(encoder_cache={}, mm_budget=BUDGET), "ECExampleConnector"),
        (SimpleNamespace(encoder_cache=None), "LMCacheNeuronECConnector"),
    ],
    ids=["text only", "another connector", "no encoder cache"],
)
def test_where_there_is_nothing_to_replace_it_says_so_and_changes_nothing(
    runner: Any, connector_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = vllm_config(BLOCKS)
    config.ec_transfer_config.ec_connector = connector_name
    before = runner.encoder_cache
    assert install_block_mapping(config, runner, CPU) is None
    assert runner.encoder_cache is before
    assert "does nothing here" in caplog.text


def test_blocks_that_cannot_hold_the_largest_item_are_an_error_at_start() -> None:
    runner = SimpleNamespace(encoder_cache={}, mm_budget=BUDGET)
    config = vllm_config(EngineOptions(settings={"device_block_size": 4, "device_num_blocks": 9}))
    config.scheduler_config.encoder_cache_size = 32  # so that the budget of 64 is that of the largest item
    with pytest.raises(SettingsError, match=r"device_num_blocks = 9 .* 64 tokens.* 17 or more"):
        install_block_mapping(config, runner, CPU)


def test_the_largest_item_is_asked_of_the_real_models_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the engine tests: pictures of at most 512 x 512, which are 256 tokens."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = checkpoint(ROOT / "build" / "models")
    config = EngineArgs(
        model=str(model),
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 3, "video": 1},
    ).create_engine_config()
    too_few = BehaviourSettings(device_block_size=64, device_num_blocks=4)
    with pytest.raises(
        SettingsError, match=r"the largest item has 256 tokens, .* takes 5 blocks; allowed is 5 or more"
    ):
        geometry_of(config, too_few, 1024)
    assert geometry_of(config, BehaviourSettings(device_block_size=64, device_num_blocks=5), 1024).capacity_blocks == 4


def test_invariant_9_a_hash_freed_and_loaded_in_one_pass_stays() -> None:
    """As vLLM 0.24 does it: the runner is not to drop what was just restored."""
    a = Image("a", 12)
    with EngineLoop(options(24)) as engine:
        engine.ask("1", a)
        engine.settle()
        engine.evict_device()
        engine.settle()
        engine.add("2", [a])
        runner = engine.runners[0]
        original, seen = runner.execute, []

        def as_in_024(output: Any) -> Any:
            assert output.ec_connector_metadata.loads
            freed = output.free_encoder_mm_hashes
            output = dataclasses.replace(output, free_encoder_mm_hashes=[*freed, a.identifier])
            given = run_plan(output, runner.connector, runner.blocks)  # type: ignore[arg-type]
            seen.append((given.free_encoder_mm_hashes == freed, a.identifier in runner.encoder_cache))
            return original(given)

        with mock.patch.object(runner, "execute", as_in_024):
            engine.step()
        assert seen == [(True, True)]
        engine.run()
        assert engine.encoder_runs(a) == 1


def test_a_plan_of_somebody_else_is_left_alone() -> None:
    output: Any = SimpleNamespace(ec_connector_metadata=object(), free_encoder_mm_hashes=["a"])
    blocks = mock.create_autospec(BlockMapping, instance=True)
    assert run_plan(output, object(), blocks) is output
    assert not blocks.mock_calls


def test_an_item_larger_than_the_whole_cache_is_used_and_not_cached() -> None:
    big, small = Image("big", 20), Image("small", 8)
    chosen = EngineOptions(
        in_blocks=True, manager=MANAGER, device_rows=64, settings={"device_block_size": 4, "device_num_blocks": 4}
    )
    with EngineLoop(chosen) as engine:
        engine.ask("1", small)
        engine.ask("2", big)
        engine.ask("3", small)
        assert engine.encoder_runs(big, small) == 2, "the small one was not driven out"
        assert engine.scheduler.encoder_cache_manager.oversize_items == 1
        mapping = engine.runners[0].blocks
        assert mapping is not None
        assert mapping.counts == {"larger_than_cache": 1}
        engine.settle()
        assert big.identifier not in mapping
