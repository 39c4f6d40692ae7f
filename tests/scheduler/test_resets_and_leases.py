# SPDX-License-Identifier: Apache-2.0
"""Invariants 10 and 11: what a reset makes void, and when a request's claim on bytes ends."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from vllm.v1.engine import FinishReason

from storage_tiers.entry import EntryState
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import ROW_BYTES, Image
from tests.scheduler.lower_tiers import WatchedTier
from tests.tiers.memory_tier import PAGE_BYTES, Clock, wait_until

CAT, DOG, FOX = Image("cat"), Image("dog", rows=16), Image("fox", rows=24)


@pytest.fixture
def tier() -> WatchedTier:
    return WatchedTier()


@pytest.fixture(params=[False, True], ids=["in_step", "async_scheduling"])
def engine(tier: WatchedTier, request: pytest.FixtureRequest) -> Iterator[EngineLoop]:
    with EngineLoop(EngineOptions(async_scheduling=request.param), [tier]) as engine:
        yield engine


# -- 10: resets --------------------------------------------------------------------------------------------------------


def test_invariant_10_after_a_reset_every_tier_misses(engine: EngineLoop, tier: WatchedTier) -> None:
    """One item on the device, one in the pool, one only below; the runner would notice an embedding of old weights."""
    engine.ask("below", FOX)
    engine.evict_device()
    engine.drop_from_pool(FOX)
    engine.ask("pool", DOG)
    engine.evict_device()
    engine.ask("device", CAT)
    engine.settle()
    assert tier.names() >= {CAT.identifier, DOG.identifier, FOX.identifier}
    engine.update_weights()
    engine.ask("after", CAT, DOG, FOX)
    assert engine.encoder_runs(CAT) == engine.encoder_runs(DOG) == engine.encoder_runs(FOX) == 2
    assert engine.loads() == []
    engine.evict_device()
    engine.drop_from_pool(CAT, DOG, FOX)
    engine.ask("the new ones", CAT, DOG, FOX)
    assert engine.encoder_runs(CAT, DOG, FOX) == 6, "what was encoded since is served"


def test_invariant_10_nothing_from_after_a_reset_is_served_in_the_next_process(
    engine: EngineLoop, tier: WatchedTier
) -> None:
    """Its weights come from disk again, or are updated to something else: nobody can know."""
    engine.ask("old", CAT)
    engine.update_weights()
    engine.ask("new", CAT, DOG)
    engine.settle()
    assert tier.header_of(DOG.identifier).fingerprint == engine.fingerprint
    for weights in (0, 2):
        with EngineLoop(EngineOptions(), [tier]) as restarted:
            restarted.told.weights = weights
            if weights:
                restarted.reset_encoder_cache()
            restarted.ask("restarted", CAT, DOG)
            assert restarted.encoder_runs(CAT, DOG) == 2


def test_invariant_10_two_resets_in_two_processes_do_not_share_a_fingerprint(tier: WatchedTier) -> None:
    seen = set()
    for _ in range(2):
        with EngineLoop(EngineOptions(), [tier]) as engine:
            seen.add(engine.fingerprint)
            for _ in range(2):
                engine.reset_encoder_cache()
                seen.add(engine.fingerprint)
    assert len(seen) == 5, "the first is the same in both, and no other is"


def test_invariant_10_a_save_in_flight_at_the_reset_is_never_served(engine: EngineLoop, tier: WatchedTier) -> None:
    worker = engine.runners[0].connector._worker
    held: list = []
    with mock.patch.object(worker._copies, "submit", lambda *copy: held.append(copy) or True):
        engine.ask("old", CAT)
    engine.update_weights()
    assert worker._copies.submit(*held[0])
    engine.settle()
    assert engine.hierarchy.counts()["save_outdated"] == 1
    engine.ask("new", CAT)
    assert engine.encoder_runs(CAT) == 2


def test_invariant_10_a_write_in_flight_at_the_reset_is_never_served(engine: EngineLoop, tier: WatchedTier) -> None:
    with tier.held("write") as (gate,):
        engine.ask("old", CAT)
        gate.wait_arrived()
        engine.update_weights()
    tier.wait_stored(CAT.identifier)
    engine.ask("new", CAT)
    assert engine.encoder_runs(CAT) == 2


def test_invariant_10_a_restore_in_flight_at_the_reset_is_never_served(engine: EngineLoop, tier: WatchedTier) -> None:
    engine.ask("old", CAT)
    engine.evict_device()
    engine.drop_from_pool(CAT)
    with tier.held("read") as (gate,):
        engine.add("waits", [CAT])
        engine.step()
        gate.wait_arrived()
        engine.update_weights()
    engine.run()
    assert engine.ended["waits"] is FinishReason.LENGTH
    assert engine.encoder_runs(CAT) == 2


def test_invariant_10_a_reset_in_the_middle_of_an_image_and_of_its_chunks() -> None:
    image = Image("wide", rows=48)
    with EngineLoop(EngineOptions(batch_tokens=16), [WatchedTier()]) as engine:
        engine.add("long", [8, image, 8, CAT], max_tokens=3)
        engine.run(until=lambda: engine.encoder_runs(image) == 1)
        engine.step()
        engine.update_weights()
        engine.run()
        assert engine.encoder_runs(image) == 2
        assert engine.encoder_runs(CAT) == 1


def test_invariant_10_reset_invalidates_can_be_switched_off(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(settings={"reset_invalidates": False}), [tier]) as engine:
        engine.ask("cold", CAT)
        engine.reset_encoder_cache()  # sleep mode, say: the weights are the same
        engine.ask("pool", CAT)
        engine.reset_encoder_cache()
        engine.drop_from_pool(CAT)
        engine.ask("below", CAT)
        assert engine.encoder_runs(CAT) == 1
        assert engine.loads() == [CAT.identifier] * 2


def test_invariant_10_a_manager_that_the_user_named_is_kept_and_a_warning_tells_what_that_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        mock.patch("connector.assembly.logger.warning") as warning,
        EngineLoop(EngineOptions(manager="vllm.v1.core.encoder_cache_manager.EncoderCacheManager")) as engine,
    ):
        assert not engine.residency.has_manager
        assert "cannot report resets" in warning.call_args.args[0]


# -- 11: leases --------------------------------------------------------------------------------------------------------


def restored(engine: EngineLoop, *images: Image) -> None:
    """Have images in the pool alone, held by nobody."""
    for image in images:
        engine.ask(f"restore {image.picture}", image)
    engine.evict_device()
    engine.settle()
    wait_until(lambda: all(engine.leases_of(image) == 0 for image in images), "nobody holds them")


def test_invariant_11_a_lease_ends_with_the_load(engine: EngineLoop) -> None:
    restored(engine, CAT)
    request = engine.add("warm", [CAT], max_tokens=3)
    assert engine.connector.ensure_cache_available(request, 0)
    assert engine.hierarchy.claimed_bytes == CAT.rows * ROW_BYTES
    engine.step()
    assert engine.hierarchy.claimed_bytes == 0, "the plan holds it now, the request no more"
    engine.catch_up()
    wait_until(lambda: engine.leases_of(CAT) == 0, "the load has been reported")
    assert "warm" not in engine.ended


def test_invariant_11_a_lease_ends_when_computed_tokens_pass_the_item(engine: EngineLoop) -> None:
    restored(engine, CAT, DOG)
    request = engine.add("long", [4, CAT, 4, DOG])
    for computed, held in [(0, (1, 1)), (4 + CAT.rows - 1, (1, 1)), (4 + CAT.rows, (0, 1)), (40, (0, 0)), (0, (1, 1))]:
        assert engine.connector.ensure_cache_available(request, computed)
        assert (engine.leases_of(CAT), engine.leases_of(DOG)) == held
    engine.run()


def test_invariant_11_a_prefix_of_the_kv_cache_needs_no_item(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(prefix_caching=True), [tier]) as engine:
        engine.ask("cold", 8, CAT, 40)
        engine.evict_device()
        engine.settle()
        reads = len(tier.threads)
        engine.ask("prefix hit", 8, CAT, 40)
        assert engine.loads() == []
        assert len(tier.threads) == reads
        assert engine.encoder_runs(CAT) == 1


def test_invariant_11_an_aborted_request_holds_nothing(engine: EngineLoop, tier: WatchedTier) -> None:
    restored(engine, CAT, DOG)
    engine.drop_from_pool(DOG)
    with tier.held("read") as (gate,):
        engine.add("aborted", [CAT, DOG])
        engine.step()
        gate.wait_arrived()
        assert engine.hierarchy.claimed_bytes > 0
        engine.abort("aborted")
        assert engine.hierarchy.claimed_bytes == 0
    wait_until(lambda: engine.state_of(DOG) is EntryState.RESIDENT, "what was being read is kept")
    engine.ask("later", CAT, DOG)
    assert engine.encoder_runs(CAT, DOG) == 2


def test_invariant_11_a_lease_ends_with_finished_req_ids_where_no_hook_tells(engine: EngineLoop) -> None:
    """What vLLM 0.24 does."""
    restored(engine, CAT)
    request = engine.add("gone", [CAT])
    assert engine.connector.ensure_cache_available(request, 0)
    with mock.patch.object(engine.connector, "request_finished", lambda request: (False, None)):
        engine.abort("gone")
    assert engine.leases_of(CAT) == 1
    engine.step()
    assert engine.leases_of(CAT) == 0


def test_invariant_11_a_preempted_request_asks_again_and_holds_nothing_in_the_end() -> None:
    """Preemption is silent: computed tokens simply begin at 0 again."""
    images = [Image(f"page {number}", rows=16) for number in range(6)]
    options = EngineOptions(
        device_rows=32, batch_tokens=32, kv_blocks=10, scheduler={"scheduler_reserve_full_isl": False}
    )
    with EngineLoop(options, [WatchedTier()]) as engine:
        engine.ask("cold", *images)
        engine.evict_device()
        for request_id in ("one", "two"):
            engine.add(request_id, [*images, 8], max_tokens=16)
        engine.run()
        assert engine.ended == dict.fromkeys(engine.ended, FinishReason.LENGTH)
        assert sum(len(output.preempted_req_ids) for output in engine.outputs) > 0
        assert engine.encoder_runs(*images) == 6


def test_invariant_11_two_requests_for_half_the_pool_each_both_go_on(engine: EngineLoop, tier: WatchedTier) -> None:
    del engine
    pages = [Image(f"page {number}", rows=64) for number in range(8)]
    with EngineLoop(EngineOptions(device_rows=256, pool_pages=16), [tier]) as filler:
        for page in pages:
            filler.ask(page.picture, page)
    options = EngineOptions(
        device_rows=256, batch_tokens=256, pool_pages=8, settings={"max_lease_fraction": 0.5, "io_threads": 2}
    )
    with EngineLoop(options, [tier]) as engine:
        engine.admission._clock = Clock()  # no deadline may be what lets them go on
        engine.add("one", pages[:4])
        engine.add("two", pages[4:])
        while engine.scheduler.has_requests():
            engine.step()
            assert engine.hierarchy.claimed_bytes <= 4 * PAGE_BYTES
        assert engine.ended == {"one": FinishReason.LENGTH, "two": FinishReason.LENGTH}


def test_invariant_11_a_lease_that_no_pool_has_room_for_is_a_miss(tier: WatchedTier) -> None:
    large = Image("large", rows=64)
    with EngineLoop(EngineOptions(), [tier]) as filler:
        filler.ask("cold", large)
    with EngineLoop(EngineOptions(pool_pages=1, settings={"max_lease_fraction": 0.5}), [tier]) as engine:
        engine.ask("warm", large)
        assert engine.encoder_runs(large) == 1


def test_invariant_11_many_waiting_requests_hold_no_more_than_the_cap(tier: WatchedTier) -> None:
    pages = [Image(f"page {number}", rows=64) for number in range(12)]
    options = EngineOptions(device_rows=64, pool_pages=16, settings={"max_lease_fraction": 0.25})
    with EngineLoop(options, [tier]) as engine:
        for page in pages:
            engine.ask(page.picture, page)
        engine.settle()
        requests = [engine.add(f"again {page.picture}", [page]) for page in pages]
        held = [engine.connector.ensure_cache_available(request, 0) for request in requests]
        assert engine.hierarchy.claimed_bytes <= 4 * PAGE_BYTES
        assert any(held)
        engine.run()
        assert set(engine.ended.values()) == {FinishReason.LENGTH}


def test_invariant_11_a_finished_id_that_is_used_again_is_another_request(engine: EngineLoop) -> None:
    restored(engine, CAT)
    engine.add("same", [CAT])
    engine.abort("same")
    engine.ask("same", CAT, DOG)
    assert engine.encoder_runs(CAT) == 1


def test_invariant_11_what_was_named_unavailable_and_aborted_is_not_named(engine: EngineLoop) -> None:
    request = engine.add("blind", [Image("nowhere", has_pixels=False)])
    wait_until(
        lambda: not engine.connector.ensure_cache_available(request, 0) and engine.admission._unavailable, "it is"
    )
    engine.abort("blind")
    assert engine.connector.take_unavailable_requests() == set()
    plan = engine.connector.build_connector_meta(
        SimpleNamespace(
            scheduled_encoder_inputs={},
            free_encoder_mm_hashes=[],
            finished_req_ids={"blind"},
            total_num_scheduled_tokens=0,
        )
    )
    assert (plan.loads, plan.saves) == ((), ())
