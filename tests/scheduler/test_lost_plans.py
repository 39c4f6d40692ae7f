# SPDX-License-Identifier: Apache-2.0
"""Invariants 4, 7 and 13: plans that never run, copies that never come or come as they should not, idle engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.engine import FinishReason

from connector.step_plan import StepPlan
from storage_tiers.entry import EntryState
from storage_tiers.transfer_board import TransferStatus
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import DTYPE, WIDTH, Image
from tests.scheduler.lower_tiers import WatchedTier
from tests.tiers.memory_tier import PAGE_BYTES, wait_until

CAT, DOG = Image("cat"), Image("dog", rows=16)

PREEMPTING = EngineOptions(
    policy="priority",
    batch_tokens=32,
    kv_blocks=6,
    scheduler={"long_prefill_token_threshold": 16, "scheduler_reserve_full_isl": False},
)
"""Five usable blocks of 16 tokens: after `start_preemption` the next pass takes an image's encoding back."""


@pytest.fixture
def tier() -> WatchedTier:
    return WatchedTier()


@pytest.fixture
def engine(tier: WatchedTier) -> Iterator[EngineLoop]:
    with EngineLoop(tiers=[tier]) as engine:
        yield engine


@pytest.fixture
def preempting() -> Iterator[EngineLoop]:
    """Nothing lies below the pool: what is not in it is a miss at once, so every pass is known in advance."""
    with EngineLoop(PREEMPTING) as engine:
        yield engine


def start_preemption(engine: EngineLoop, image: Image = CAT) -> None:
    """Bring "low" and "high" to where the next pass schedules the image of "low" and then preempts "low" for "high"."""
    engine.settle()
    low = engine.add("low", [48, image, 20], priority=9)
    while low.num_computed_tokens < 32:  # one step, or two where a request that is alone is held to the threshold, too
        engine.step()
    engine.add("high", [48], priority=0)
    assert engine.step().num_scheduled_tokens == {"low": 16, "high": 16}


@contextmanager
def no_kv_blocks_for(engine: EngineLoop, request_id: str) -> Iterator[None]:
    """Have the KV cache full of what cannot be preempted, as far as one request is concerned."""
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def refuse(request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if request.request_id == request_id else allocate(request, *args, **kwargs)

    with mock.patch.object(manager, "allocate_slots", refuse):
        yield


def no_tokens(**changes: Any) -> SimpleNamespace:
    """What `build_connector_meta` reads of a pass that schedules nothing."""
    values = {
        "scheduled_encoder_inputs": {},
        "free_encoder_mm_hashes": [],
        "finished_req_ids": set(),
        "total_num_scheduled_tokens": 0,
    }
    return SimpleNamespace(**(values | changes))


# -- 7: preempted encodes ----------------------------------------------------------------------------------------------


def test_invariant_07_an_encode_that_a_preemption_took_back_is_not_saved_and_not_listed(preempting: EngineLoop) -> None:
    engine = preempting
    start_preemption(engine)
    output = engine.step()
    assert output.num_scheduled_tokens == {"high": 16}, "the preemption this test is about"
    assert engine.side.counts["encode_taken_back"] == 1
    assert engine.plans[-1].saves == ()
    manager = engine.scheduler.encoder_cache_manager
    assert CAT.identifier not in manager.cached
    assert (manager.num_free_slots, manager.num_freeable_slots) == (manager.cache_size, manager.cache_size)
    assert engine.pool.used_bytes == 0
    engine.run()
    assert engine.ended == {"low": FinishReason.LENGTH, "high": FinishReason.LENGTH}
    assert engine.encoder_runs(CAT) == 1
    assert engine.saves() == [CAT.identifier]


def test_invariant_07_another_request_encodes_what_was_taken_back(preempting: EngineLoop) -> None:
    """Without the manager's forgetting, it would rely on an item that nobody has encoded, and the engine would die."""
    engine = preempting
    start_preemption(engine)
    engine.step()
    engine.add("other", [CAT], priority=0)
    engine.run()
    assert engine.ended["other"] is FinishReason.LENGTH
    assert engine.encoder_runs(CAT) == 1


def test_invariant_07_a_load_of_a_preempted_request_is_still_made(preempting: EngineLoop) -> None:
    engine = preempting
    engine.ask("cold", CAT)
    engine.evict_device()
    start_preemption(engine)
    output = engine.step()
    assert output.num_scheduled_tokens == {"high": 16}
    assert [load.mm_hash for load in engine.plans[-1].loads] == [CAT.identifier]
    assert CAT.identifier in engine.runners[0].encoder_cache
    engine.run()
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]


def test_invariant_07_where_the_manager_cannot_forget_the_save_is_taken_back_all_the_same() -> None:
    stock = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
    with EngineLoop(replace(PREEMPTING, manager=stock)) as engine:
        start_preemption(engine)
        engine.step()
        assert engine.plans[-1].saves == ()
        assert engine.pool.used_bytes == 0
        for request_id in ("low", "high"):
            engine.abort(request_id)


def test_invariant_07_a_preempted_request_may_end_while_it_waits_for_bytes() -> None:
    """Two steps are in flight: the later one preempts it, and the earlier one samples its last token."""
    options = EngineOptions(
        async_scheduling=True,
        ahead=2,
        policy="priority",
        kv_blocks=6,
        scheduler={"scheduler_reserve_full_isl": False},
    )
    with EngineLoop(options) as engine:
        engine.add("high", [63], max_tokens=8, priority=0)
        engine.step()
        low = engine.add("low", [CAT, 8], priority=9)
        ensure = engine.connector.ensure_cache_available

        def waits(request: Any, num_computed_tokens: int) -> bool:
            return ensure(request, num_computed_tokens) and not low.num_preemptions

        with mock.patch.object(engine.connector, "ensure_cache_available", waits):
            assert "low" in engine.step().num_scheduled_tokens
            assert engine.step().preempted_req_ids == {"low"}
            engine.run(until=lambda: "low" in engine.ended)
        engine.run()
        assert engine.ended == {"low": FinishReason.LENGTH, "high": FinishReason.LENGTH}


# -- 7: steps without tokens -------------------------------------------------------------------------------------------


def test_invariant_07_a_step_without_tokens_carries_no_load_and_the_next_one_does(preempting: EngineLoop) -> None:
    engine = preempting
    engine.ask("cold", CAT)
    engine.evict_device()
    start_preemption(engine)
    with no_kv_blocks_for(engine, "high"):
        output = engine.step()
    assert output.total_num_scheduled_tokens == 0, "the step this test is about"
    assert (engine.plans[-1].loads, engine.plans[-1].saves) == ((), ())
    assert engine.leases_of(CAT) > 0
    engine.step()
    assert [load.mm_hash for load in engine.plans[-1].loads] == [CAT.identifier]
    engine.run()
    assert engine.encoder_runs(CAT) == 1
    assert engine.loads() == [CAT.identifier]


def test_invariant_07_a_save_of_a_step_without_tokens_is_taken_back_with_its_encode(preempting: EngineLoop) -> None:
    engine = preempting
    start_preemption(engine)
    with no_kv_blocks_for(engine, "high"):
        assert engine.step().total_num_scheduled_tokens == 0
    assert engine.pool.used_bytes == 0
    engine.run()
    assert (engine.encoder_runs(CAT), engine.saves()) == (1, [CAT.identifier])


def test_invariant_07_a_load_that_waited_for_tokens_ends_when_its_item_is_freed(preempting: EngineLoop) -> None:
    engine = preempting
    engine.ask("cold", CAT)
    engine.evict_device()
    start_preemption(engine)
    with no_kv_blocks_for(engine, "high"):
        engine.step()
    engine.abort("low")
    engine.abort("high")
    engine.evict_device()
    assert engine.loads() == []
    assert CAT.identifier not in engine.runners[0].encoder_cache
    assert engine.leases_of(CAT) == 0


@pytest.mark.parametrize("invalidates", [True, False])
def test_invariant_07_a_load_that_waited_for_tokens_ends_with_a_reset(invalidates: bool) -> None:
    with EngineLoop(replace(PREEMPTING, settings={"reset_invalidates": invalidates})) as engine:
        engine.ask("cold", CAT)
        engine.evict_device()
        start_preemption(engine)
        with no_kv_blocks_for(engine, "high"):
            engine.step()
        engine.reset_encoder_cache()
        engine.abort("low")
        engine.run()
        assert engine.loads() == []
        assert CAT.identifier not in engine.runners[0].encoder_cache


def load_pinned(engine: EngineLoop, request_id: str) -> None:
    """The scheduler's calls for a request whose image is loaded, up to its allocation."""
    request = engine.scheduler.requests.get(request_id) or engine.add(request_id, [CAT])
    assert engine.connector.ensure_cache_available(request, 0)
    assert engine.connector.has_cache_item(CAT.identifier)
    engine.connector.update_state_after_alloc(request, 0)


def test_invariant_07_an_item_evicted_and_loaded_again_before_its_load_went_out_is_loaded_once(
    engine: EngineLoop,
) -> None:
    """Its load waited for a step with tokens; in that pass it lost its place on the device, and got another."""
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.settle()
    load_pinned(engine, "first")
    assert engine.connector.build_connector_meta(no_tokens()).loads == ()
    load_pinned(engine, "second")
    plan = engine.connector.build_connector_meta(no_tokens(total_num_scheduled_tokens=8))
    assert [load.mm_hash for load in plan.loads] == [CAT.identifier]
    finish_by_hand(engine, plan)
    for request_id in ("first", "second"):
        engine.abort(request_id)
    assert engine.leases_of(CAT) == 0


def test_invariant_07_an_item_that_is_loaded_and_evicted_in_one_pass_is_not_loaded(engine: EngineLoop) -> None:
    """Its request was preempted, and a later request of the pass needed the room: nobody would ever free it."""
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.settle()
    load_pinned(engine, "preempted")
    plan = engine.connector.build_connector_meta(
        no_tokens(free_encoder_mm_hashes=[CAT.identifier], total_num_scheduled_tokens=8)
    )
    assert plan.loads == ()
    engine.abort("preempted")
    assert engine.leases_of(CAT) == 0


def test_invariant_07_where_vllm_names_freed_hashes_that_it_allocated_again_their_loads_stand() -> None:
    """As vLLM 0.24 does, which takes no manager of ours."""
    stock = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
    with EngineLoop(EngineOptions(manager=stock)) as engine:
        engine.ask("cold", CAT)
        engine.evict_device()
        engine.settle()
        load_pinned(engine, "restored")
        plan = engine.connector.build_connector_meta(
            no_tokens(free_encoder_mm_hashes=[CAT.identifier], total_num_scheduled_tokens=8)
        )
        assert [load.mm_hash for load in plan.loads] == [CAT.identifier]
        assert CAT.identifier in engine.residency
        finish_by_hand(engine, plan)
        engine.abort("restored")


def finish_by_hand(engine: EngineLoop, plan: StepPlan) -> None:
    """Report a plan's loads as a worker does that has made them."""
    for load in plan.loads:
        engine.board.rank(0).set_status(load.slot, TransferStatus.DONE)
    engine.board.rank(0).complete_plan(plan.number)
    wait_until(lambda: not engine.ledger.num_outstanding, "the loads have ended")


# -- 7: numbers and statuses -------------------------------------------------------------------------------------------


def test_invariant_07_plans_are_numbered_without_gaps_and_each_rank_reports_the_last(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(ranks=2), [tier]) as engine:
        engine.ask("one", CAT, max_tokens=4)
        engine.ask("two", DOG, max_tokens=4)
        numbers = [plan.number for plan in engine.plans]
        assert numbers == list(range(1, len(numbers) + 1))
        last_run = max(
            output.ec_connector_metadata.number for output in engine.outputs if output.total_num_scheduled_tokens
        )
        assert [engine.board.completed_plan(rank) for rank in range(2)] == [last_run, last_run]


def test_invariant_07_a_save_that_never_came_has_failed_when_its_plan_is_complete(engine: EngineLoop) -> None:
    with mock.patch.object(engine.runners[0].connector, "save_caches"):
        engine.ask("cold", CAT)
    engine.settle()
    assert engine.ledger.counts() == {"save_copy_failed": 1}
    assert engine.state_of(CAT) is None
    assert engine.pool.used_bytes == 0
    engine.evict_device()
    engine.ask("again", CAT)
    engine.settle()
    assert engine.state_of(CAT) is EntryState.RESIDENT


def test_invariant_07_a_plan_that_was_dropped_has_failed_when_a_later_one_is_complete(engine: EngineLoop) -> None:
    worker = engine.runners[0].connector._worker
    with mock.patch.object(worker, "bind"):
        engine.add("cold", [CAT], max_tokens=2)
        engine.run(until=lambda: bool(engine.saves()))
    engine.ledger.poll()
    assert engine.ledger.num_outstanding == 1
    assert engine.pool.used_bytes == PAGE_BYTES, "no time limit ends a transfer"
    engine.run()
    engine.settle()
    assert engine.ledger.counts() == {"save_copy_failed": 1}
    assert engine.pool.used_bytes == 0


def test_invariant_07_memory_of_a_deferred_save_returns_by_its_status_and_not_before(engine: EngineLoop) -> None:
    worker = engine.runners[0].connector._worker
    held: list[tuple[Any, ...]] = []
    with mock.patch.object(worker._copies, "submit", lambda *copy: held.append(copy) or True):
        engine.ask("cold", CAT)
        engine.ask("later plans", DOG, max_tokens=5)
    engine.ledger.poll()
    assert engine.ledger.num_outstanding == 2
    assert engine.pool.used_bytes == 2 * PAGE_BYTES
    save, source, *_ = held[0]
    assert save.mm_hash == CAT.identifier
    worker._place_of(save).copy_(source.views[0])
    worker._finish_save(save, succeeded=True)
    wait_until(lambda: engine.state_of(CAT) is EntryState.RESIDENT, "the status was seen")
    worker._finish_save(held[1][0], succeeded=False)
    wait_until(lambda: engine.pool.used_bytes == PAGE_BYTES, "the status was seen")
    assert engine.state_of(DOG) is None


def test_invariant_07_a_worker_forgets_the_saves_of_a_plan_that_has_ended(engine: EngineLoop) -> None:
    """Their memory has been given back: a late copy would hit another item's bytes."""
    connector = engine.runners[0].connector
    with mock.patch.object(connector, "save_caches"):
        engine.ask("cold", CAT)
    engine.settle()
    engine.add("next in that memory", [DOG])
    with mock.patch.object(connector._worker._copies, "submit") as submit:
        connector.save_caches(
            encoder_cache={CAT.identifier: torch.zeros(CAT.rows, WIDTH, dtype=DTYPE)}, mm_hash=CAT.identifier
        )
    submit.assert_not_called()


# -- 4: idle engines call no hook --------------------------------------------------------------------------------------


def test_invariant_04_a_save_reaches_the_lower_tier_without_another_call_of_a_hook(
    engine: EngineLoop, tier: WatchedTier
) -> None:
    engine.add("only", [CAT])
    engine.run(until=lambda: bool(engine.saves()))
    passes = len(engine.outputs)
    # From here on nobody turns the engine, not even to end the request.
    tier.wait_stored(CAT.identifier)
    assert len(engine.outputs) == passes


def test_invariant_04_nor_when_its_copy_ends_long_after_the_step(engine: EngineLoop, tier: WatchedTier) -> None:
    worker = engine.runners[0].connector._worker
    held: list[tuple[Any, ...]] = []
    with mock.patch.object(worker._copies, "submit", lambda *copy: held.append(copy) or True):
        engine.add("only", [CAT])
        engine.run(until=lambda: bool(engine.saves()))
    assert tier.names() == set()
    assert worker._copies.submit(*held[0])
    tier.wait_stored(CAT.identifier)


# -- 13: sizes can surprise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surprise",
    [
        torch.zeros(CAT.rows, 2 * WIDTH, dtype=DTYPE),
        torch.zeros(CAT.rows - 1, WIDTH, dtype=DTYPE),
        torch.zeros(CAT.rows, WIDTH, dtype=torch.float32),
        torch.zeros(CAT.rows * WIDTH, dtype=DTYPE),
    ],
    ids=["width", "rows", "dtype", "dimensions"],
)
def test_invariant_13_an_embedding_that_is_not_as_planned_is_not_saved(
    engine: EngineLoop, tier: WatchedTier, surprise: torch.Tensor
) -> None:
    connector = engine.runners[0].connector
    save = connector.save_caches

    def surprised(encoder_cache: dict[str, torch.Tensor], mm_hash: str) -> None:
        save(encoder_cache={mm_hash: surprise}, mm_hash=mm_hash)

    with mock.patch.object(connector, "save_caches", surprised):
        engine.ask("cold", CAT)
    engine.settle()
    assert engine.ledger.counts() == {"save_copy_failed": 1}
    assert engine.faults()["device", "unexpected_shape"] == 1
    assert tier.names() == set()
    assert engine.pool.used_bytes == 0


def test_invariant_13_a_modality_without_a_measured_width_is_not_saved(engine: EngineLoop, tier: WatchedTier) -> None:
    engine.ask("cold", Image("song", modality="audio"))
    assert engine.saves() == []
    assert engine.side.counts["save_without_width"] == 1


def test_invariant_13_save_caches_without_a_plan_or_an_entry_in_it_returns_quietly(engine: EngineLoop) -> None:
    connector = engine.runners[0].connector
    cache = {"tmp_0": torch.zeros(4, WIDTH, dtype=DTYPE)}
    connector.save_caches(encoder_cache=cache, mm_hash="tmp_0")  # as profiling does, before any plan
    connector.bind_connector_metadata(StepPlan(1, engine.side._parts.segment_name))
    connector.save_caches(encoder_cache=cache, mm_hash="tmp_0")
    connector.clear_connector_metadata()
    connector.save_caches(encoder_cache=cache, mm_hash="absent")
    assert engine.faults() == {}
    engine.side._plan_number = 1


def test_invariant_13_a_full_queue_of_copies_is_a_failed_save_and_no_error(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(settings={"save_queue_bytes": 1}), [tier]) as engine:
        copies = engine.runners[0].connector._worker._copies
        with mock.patch.object(copies, "_kept_bytes", 1):
            engine.ask("cold", CAT)
        engine.settle()
        assert engine.ledger.counts() == {"save_copy_failed": 1}
        assert engine.faults()["device", "save_queue_full"] == 1
