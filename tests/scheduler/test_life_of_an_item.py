# SPDX-License-Identifier: Apache-2.0
"""What a user sees: an image is encoded once, and comes back from wherever it went, with the same bytes.

The runner stand-in compares every row that reaches the language model with what the encoder makes of that picture.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

import connector
from connector.cache_manager import ReportingEncoderCacheManager
from connector.ec_connector import LMCacheNeuronECConnector
from storage_tiers.entry import EntryState
from tests.scheduler.engine_loop import EngineLoop, EngineOptions, vllm_config
from tests.scheduler.items import WIDTH, Image
from tests.scheduler.lower_tiers import WatchedTier
from tests.scheduler.versions import asks_for_later_turns
from tests.tiers.memory_tier import Clock, wait_until

CAT, DOG, FOX = Image("cat"), Image("dog", rows=16), Image("fox", rows=24)


@pytest.fixture(params=[False, True], ids=["in_step", "async_scheduling"])
def options(request: pytest.FixtureRequest) -> EngineOptions:
    return EngineOptions(async_scheduling=request.param)


@pytest.fixture
def engine(options: EngineOptions) -> Iterator[EngineLoop]:
    with EngineLoop(options, [WatchedTier()]) as engine:
        yield engine


def store(tier: WatchedTier, *images: Image, options: EngineOptions | None = None) -> None:
    """Have an engine of its own encode images, so that they are in `tier` alone."""
    with EngineLoop(options or EngineOptions(), [tier]) as engine:
        for image in images:
            engine.ask(f"store {image.picture}", image)


# -- Where it comes back from ------------------------------------------------------------------------------------------


def test_what_the_device_evicted_is_loaded_from_the_pool_and_not_encoded(engine: EngineLoop) -> None:
    engine.ask("cold", 3, CAT, 2)
    assert engine.saves() == [CAT.identifier]
    engine.evict_device()
    assert CAT.identifier not in engine.runners[0].encoder_cache
    engine.ask("warm", 3, CAT, 2)
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]
    assert ("warm", CAT.identifier) in engine.runners[0].gathered


def test_what_the_pool_evicted_too_is_restored_from_below(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.drop_from_pool(CAT)
    engine.ask("warm", CAT)
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]


def test_a_hit_on_the_device_is_neither_loaded_nor_saved_again(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.ask("warm", CAT)
    assert engine.encoder_runs(CAT) == 1
    assert (engine.loads(), engine.saves()) == ([], [CAT.identifier])


def test_a_restarted_engine_encodes_nothing_from_its_first_request_on(options: EngineOptions) -> None:
    tier = WatchedTier()
    store(tier, CAT, DOG, FOX, options=options)
    with EngineLoop(options, [tier]) as engine:
        engine.ask("first", 2, CAT, 1, DOG, FOX)
        assert not engine.encoded
        assert engine.saves() == [], "what is stored is not written again"
        engine.settle()
        assert tier.calls["write"] == 3


def test_the_same_over_the_disk_tier_and_the_connectors_own_assembly(options: EngineOptions, tmp_path: Path) -> None:
    on_disk = EngineOptions(
        async_scheduling=options.async_scheduling,
        settings={
            "local_disk": f"file://{tmp_path}/",
            "max_local_disk_size": 0.01,
            "skip_slow_restores": False,  # to encode takes no time here
        },
    )
    with EngineLoop(on_disk, tiers=None) as engine:
        engine.ask("cold", CAT, 5, DOG)
        engine.evict_device()
        engine.drop_from_pool(CAT)
        engine.ask("warm", CAT, DOG)
        assert engine.encoder_runs(CAT, DOG) == 2
    with EngineLoop(on_disk, tiers=None) as engine:
        engine.ask("restarted", DOG, CAT)
        assert not engine.encoded
        engine.drop_from_pool(CAT, DOG)
        engine.evict_device()
        damaged = next(path for path in tmp_path.rglob("*.pt") if path.stat().st_size)
        damaged.write_bytes(damaged.read_bytes()[:100])
        engine.ask("after damage", DOG, CAT)
        assert engine.encoder_runs(CAT, DOG) <= 1, "only what was damaged is encoded again"


def test_without_a_tier_below_the_pool_serves_what_it_holds(options: EngineOptions) -> None:
    with EngineLoop(options, []) as engine:
        engine.ask("cold", CAT)
        engine.evict_device()
        engine.ask("warm", CAT)
        assert engine.encoder_runs(CAT) == 1


# -- Several items -----------------------------------------------------------------------------------------------------


def test_all_hits_of_a_request_are_one_batch_in_one_plan(engine: EngineLoop) -> None:
    images = [Image(f"page {number}", rows=4) for number in range(6)]
    engine.ask("cold", *images)
    engine.evict_device()
    engine.ask("warm", *images)
    loading = [plan for plan in engine.plans if plan.loads]
    assert len(loading) == 1
    assert [load.mm_hash for load in loading[0].loads] == [image.identifier for image in images]
    assert not loading[0].saves


def test_hit_miss_hit_encodes_the_one_miss_and_writes_the_hits_no_second_time(engine: EngineLoop) -> None:
    engine.ask("cold", CAT, FOX)
    engine.evict_device()
    engine.ask("mixed", CAT, DOG, FOX)
    assert engine.encoder_runs(CAT, DOG, FOX) == 3
    assert [name for _, name in engine.runners[0].gathered[-3:]] == [CAT.identifier, DOG.identifier, FOX.identifier]
    engine.settle()
    assert engine.hierarchy.counts()["write"] == 4  # and the filler


def test_the_same_image_twice_in_one_request_is_encoded_saved_and_loaded_once(engine: EngineLoop) -> None:
    engine.ask("cold", CAT, 3, CAT)
    engine.evict_device()
    engine.ask("warm", CAT, 3, CAT)
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]
    assert [save for save in engine.saves() if save == CAT.identifier] == [CAT.identifier]


def test_the_same_image_in_two_requests_of_one_pass_is_loaded_once(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.add("one", [CAT, 2])
    engine.add("two", [1, CAT])
    engine.run()
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]
    assert {("one", CAT.identifier), ("two", CAT.identifier)} <= set(engine.runners[0].gathered)


def test_a_new_image_in_two_requests_of_one_pass_is_encoded_once(engine: EngineLoop) -> None:
    engine.add("one", [CAT, 2])
    engine.add("two", [1, CAT])
    engine.run()
    assert engine.encoder_runs(CAT) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_prompt_in_chunks_restores_more_images_than_the_device_holds(asynchronous: bool) -> None:
    options = EngineOptions(device_rows=24, batch_tokens=32, async_scheduling=asynchronous)
    images = [Image(f"page {number}") for number in range(12)]
    parts = [part for image in images for part in (image, 3)]
    with EngineLoop(options, [WatchedTier()]) as engine:
        engine.ask("cold", *parts, max_tokens=3)
        assert engine.encoder_runs(*images) == 12
        engine.evict_device()
        engine.ask("warm", *parts, max_tokens=3)
        assert engine.encoder_runs(*images) == 12
        assert sorted(engine.loads()) == sorted(image.identifier for image in images)


def test_a_request_for_an_item_that_is_being_saved_waits_for_it(engine: EngineLoop) -> None:
    """Absent and being saved are two answers (field report 4)."""
    worker = engine.runners[0].connector._worker
    held = []
    worker._copies.submit = lambda *copy: bool(held.append(copy)) or True
    engine.ask("cold", CAT)
    del worker._copies.submit
    engine.evict_device()
    engine.add("warm", [CAT])
    for _ in range(5):
        engine.step()
    assert engine.state_of(CAT) is EntryState.SAVING
    assert "warm" not in engine.ended
    for copy in held:
        assert worker._copies.submit(*copy)
    engine.run()
    assert engine.encoder_runs(CAT) == 1


# -- Waiting -----------------------------------------------------------------------------------------------------------


def test_others_run_while_a_request_waits_for_bytes(engine: EngineLoop) -> None:
    (tier,) = engine.hierarchy._lower._tiers
    engine.ask("cold", CAT)
    engine.ask("other", DOG)
    engine.evict_device()
    engine.drop_from_pool(CAT)
    gate = tier.hold("read")
    engine.add("waits", [CAT])
    engine.add("runs", [DOG], max_tokens=5)
    engine.run(until=lambda: "runs" in engine.ended)
    assert "waits" not in engine.ended
    gate.open()
    engine.run()
    assert engine.ended["waits"] is FinishReason.LENGTH
    assert engine.encoder_runs(CAT, DOG) == 2


def test_a_request_that_has_waited_long_enough_is_encoded(engine: EngineLoop) -> None:
    (tier,) = engine.hierarchy._lower._tiers
    clock = engine.admission._clock = Clock()
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.drop_from_pool(CAT)
    with tier.held("read") as (gate,):
        engine.add("warm", [CAT])
        for _ in range(10):
            assert engine.step().total_num_scheduled_tokens == 0
        gate.wait_arrived()
        clock.advance(2.5)
        engine.run()
        assert engine.ended["warm"] is FinishReason.LENGTH
        assert engine.encoder_runs(CAT) == 2
        assert engine.admission.counts["staging_deadline_missed"] == 1
    wait_until(lambda: engine.state_of(CAT) is EntryState.RESIDENT, "the late bytes are in the pool")
    engine.evict_device()
    engine.ask("again", CAT)
    assert engine.encoder_runs(CAT) == 2, "the next request has the late bytes"


def test_items_that_fail_to_be_read_are_encoded(engine: EngineLoop) -> None:
    (tier,) = engine.hierarchy._lower._tiers
    engine.ask("cold", CAT, DOG)
    engine.evict_device()
    engine.drop_from_pool(CAT, DOG)
    tier.damage(CAT.identifier)
    engine.ask("damaged", CAT, DOG)
    assert engine.encoder_runs(CAT, DOG) == 3
    engine.evict_device()
    engine.drop_from_pool(CAT, DOG)
    tier.fail("read", OSError("the disk is gone"))
    engine.ask("gone", CAT, DOG)
    assert engine.encoder_runs(CAT, DOG) == 5


# -- Roles -------------------------------------------------------------------------------------------------------------


def test_a_producer_only_saves(options: EngineOptions) -> None:
    tier = WatchedTier()
    producer = EngineOptions(role="ec_producer", async_scheduling=options.async_scheduling)
    with EngineLoop(producer, [tier]) as engine:
        engine.add("one", [CAT, 3, DOG])
        engine.run()
        assert engine.encoder_runs(CAT, DOG) == 2
        assert engine.loads() == []
    assert tier.names() == {CAT.identifier, DOG.identifier}
    assert tier.calls["read"] == 0


def test_field_report_10_an_encoder_only_engine_asked_for_an_item_that_its_connector_holds(
    options: EngineOptions,
) -> None:
    producer = EngineOptions(role="ec_producer", async_scheduling=options.async_scheduling)
    with EngineLoop(producer, [WatchedTier()]) as engine:
        for name in ("one", "device hit"):
            engine.add(name, [CAT])
            engine.run()
        engine.add("filler", [Image("filler", rows=64)])
        engine.run()
        engine.add("pool hit", [CAT])
        engine.run()
        # 0.24 knows no end of its own for such an engine: its runner samples a token, and one was asked for.
        reason = FinishReason.STOP if hasattr(engine.scheduler, "is_mm_encoder_only") else FinishReason.LENGTH
        assert engine.ended == dict.fromkeys(("one", "device hit", "filler", "pool hit"), reason)
        assert not engine.runners[0].gathered
        assert engine.loads() == []
        assert engine.saves().count(CAT.identifier) == 1


def test_a_consumer_only_loads_and_never_saves(options: EngineOptions) -> None:
    tier = WatchedTier()
    store(tier, CAT)
    consumer = EngineOptions(role="ec_consumer", async_scheduling=options.async_scheduling)
    with EngineLoop(consumer, [tier]) as engine:
        engine.admission._identity._widths["image"] = WIDTH  # not what keeps it from saving
        engine.ask("hit and miss", CAT, DOG)
        assert engine.encoder_runs(CAT) == 0
        assert engine.encoder_runs(DOG) == 1
        assert engine.saves() == []
    assert tier.names() == {CAT.identifier}


def test_what_a_producer_stored_serves_a_consumer_without_pixels(options: EngineOptions) -> None:
    tier = WatchedTier()
    store(tier, CAT, DOG, options=EngineOptions(role="ec_both"))
    consumer = EngineOptions(role="ec_consumer", async_scheduling=options.async_scheduling)
    with EngineLoop(consumer, [tier]) as engine:
        engine.ask("decode", Image("cat", has_pixels=False), 4, Image("dog", rows=16, has_pixels=False))
        assert not engine.encoded


# -- Adapters ----------------------------------------------------------------------------------------------------------


def adapter_at(directory: Path, content: bytes, number: int) -> LoRARequest:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest("stamps", number, str(directory))


def test_field_report_06_another_adapter_under_the_same_name_is_a_miss(engine: EngineLoop, tmp_path: Path) -> None:
    first = adapter_at(tmp_path / "one", b"1" * 1000, 1)
    engine.ask("cold", CAT, adapter=first)
    engine.evict_device()
    engine.ask("warm", CAT, adapter=first)
    identifier = f"stamps:{CAT.identifier}"
    assert engine.encoded[identifier] == 1
    engine.evict_device()
    second = adapter_at(tmp_path / "two", b"2" * 1000, 2)
    engine.ask("other adapter", CAT, adapter=second)
    assert engine.encoded[identifier] == 2
    engine.evict_device()
    engine.ask("other adapter, warm", CAT, adapter=second)
    assert engine.encoded[identifier] == 2


def test_field_report_06_other_weights_at_the_same_path_are_a_miss(engine: EngineLoop, tmp_path: Path) -> None:
    engine.ask("cold", CAT, adapter=adapter_at(tmp_path / "one", b"1" * 1000, 1))
    engine.evict_device()
    engine.drop_from_pool()
    reloaded = adapter_at(tmp_path / "one", b"2" * 1000, 2)
    engine.told.weights += 1
    engine.ask("reloaded", CAT, adapter=reloaded)
    assert engine.encoded[f"stamps:{CAT.identifier}"] == 2


# -- Unusual requests and engines -------------------------------------------------------------------------------------


@asks_for_later_turns
def test_a_streaming_session_whose_next_turn_brings_another_image(engine: EngineLoop) -> None:
    engine.ask("cold", CAT, DOG)
    engine.evict_device()
    session = engine.add("session", [4, CAT, 4], resumable=True)
    engine.run(until=lambda: session.status is RequestStatus.WAITING_FOR_STREAMING_REQ)
    engine.evict_device()
    engine.add("session", [DOG, 4], resumable=True)
    engine.run(until=lambda: session.status is RequestStatus.WAITING_FOR_STREAMING_REQ)
    engine.add("session", [1], resumable=False)  # what ends it
    engine.run()
    assert engine.encoder_runs(CAT, DOG) == 2
    assert engine.loads() == [CAT.identifier, DOG.identifier]


def test_an_image_whose_rows_are_set_apart_by_text(engine: EngineLoop) -> None:
    image = Image("striped", rows=20, row_tokens=4)
    engine.ask("cold", 3, image, 3)
    engine.evict_device()
    engine.ask("warm", 3, image, 3)
    assert engine.encoder_runs(image) == 1
    assert engine.state_of(image) is EntryState.RESIDENT


def test_what_is_running_but_never_announced_is_still_known(engine: EngineLoop) -> None:
    """As in vLLM 0.24, which asks for waiting requests only."""
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.settle()
    request = engine.add("running", [CAT])
    assert engine.connector.ensure_cache_available(request, 0)
    assert engine.connector.ensure_cache_available(engine.add("other", [DOG]), 0) in (True, False)
    assert engine.connector.has_cache_item(CAT.identifier)
    engine.run()
    assert engine.encoder_runs(CAT) == 1


def test_more_loads_than_transfer_slots_are_encoded_and_not_waited_for() -> None:
    options = EngineOptions(device_rows=128, batch_tokens=128, settings={"transfer_slots": 64})
    images = [Image(f"icon {number}", rows=1) for number in range(100)]
    with EngineLoop(options) as engine:
        for first in range(0, 100, 50):
            engine.ask(f"cold {first}", *images[first : first + 50])
            engine.settle()
        engine.evict_device()
        engine.settle()
        engine.ask("warm", *images)
        assert engine.side.counts["no_transfer_slot"] >= 36
        assert len(engine.loads()) == 64
        assert engine.encoder_runs(*images) == 136


@pytest.mark.parametrize("hook", ["ensure_available", "has_item"])
def test_an_error_of_ours_is_a_miss_that_is_counted(options: EngineOptions, hook: str) -> None:
    with EngineLoop(options) as engine:
        engine.ask("cold", CAT)
        engine.evict_device()
        engine.settle()
        with mock.patch.object(engine.side, hook, side_effect=ZeroDivisionError):
            engine.ask("warm", CAT)
        assert engine.encoder_runs(CAT) == 2
        assert any(tier == "connector" for tier, _ in engine.faults())


# -- The connector as vLLM makes it ------------------------------------------------------------------------------------


def test_vllm_makes_the_connector_by_name_and_the_manager_that_reports() -> None:
    connector.register()
    connector.register()
    with EngineLoop(attach=False) as engine:
        assert type(engine.scheduler.ec_connector) is LMCacheNeuronECConnector
        assert type(engine.scheduler.encoder_cache_manager) is ReportingEncoderCacheManager
        assert engine.residency.has_manager
        engine.start_workers()


def test_the_whole_connector_is_built_from_the_module_path_that_users_give() -> None:
    config = vllm_config()
    config.ec_transfer_config.ec_connector_module_path = "connector"
    config.ec_transfer_config.ec_connector = "LMCacheNeuronECConnector"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(ECConnectorFactory._registry, "LMCacheNeuronECConnector")
        made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    try:
        assert isinstance(made, LMCacheNeuronECConnector)
        with pytest.raises(RuntimeError, match="worker's hook"):
            made.save_caches({}, "")
    finally:
        made.shutdown()
