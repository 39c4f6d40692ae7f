# SPDX-License-Identifier: Apache-2.0
"""Invariants 1, 2, 3 and 6: what the connector answers, and that an answer holds whatever happens after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason

from storage_tiers.entry import EntryState
from storage_tiers.transfer_board import RankGauge
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import WIDTH, Image, address_item
from tests.scheduler.lower_tiers import WatchedTier
from tests.scheduler.versions import needs_size_checks
from tests.tiers.memory_tier import PAGE_BYTES, Clock, wait_until

CAT, DOG = Image("cat"), Image("dog", rows=16)
BLIND_CAT = Image("cat", has_pixels=False)


@pytest.fixture
def tier() -> WatchedTier:
    return WatchedTier()


@pytest.fixture
def engine(tier: WatchedTier) -> Iterator[EngineLoop]:
    with EngineLoop(tiers=[tier]) as engine:
        yield engine


@contextmanager
def after(owner: Any, hook: str, then: Callable[[Any], None]) -> Iterator[None]:
    """Have `then(answer)` run between the answer of `owner.hook` and whatever the scheduler does next; once."""
    original = getattr(owner, hook)
    pending = [then]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if pending:
            pending.pop()(answer)
        return answer

    setattr(owner, hook, wrapped)
    yield
    delattr(owner, hook)
    assert not pending, f"{hook} was never called"


def store_below(engine: EngineLoop, *images: Image) -> None:
    """Leave images in the lower tier alone."""
    for image in images:
        engine.ask(f"store {image}", image)
    engine.evict_device()
    engine.drop_from_pool(*images)


# -- 1: one answer per pass --------------------------------------------------------------------------------------------


def test_invariant_01_a_no_stands_though_the_bytes_arrive_before_the_allocation(
    engine: EngineLoop, tier: WatchedTier
) -> None:
    clock = engine.admission._clock = Clock()
    store_below(engine, CAT)
    gate = tier.hold("read")
    engine.add("late", [CAT])
    engine.step()
    gate.wait_arrived()
    clock.advance(100.0)

    def arrive(answer: bool) -> None:
        assert answer is False
        gate.open()
        wait_until(lambda: engine.state_of(CAT) is EntryState.RESIDENT, "the bytes are there")
        assert engine.connector.has_cache_item(CAT.identifier) is False, "asked again, the answer is the same"

    with after(engine.connector, "has_cache_item", arrive):
        output = engine.step()
    assert output.scheduled_encoder_inputs == {"late": [0]}
    assert (engine.plans[-1].loads, engine.plans[-1].saves) == ((), ())
    assert engine.encoder_runs(CAT) == 2


def test_invariant_01_a_yes_pins_the_item_against_eviction_until_the_load_is_done(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.settle()
    pressing: list[Any] = []

    def press(answer: bool) -> None:
        assert answer is True
        engine.admission.forget_all()  # the request's own lease shall not be what holds it
        page = torch.Size((PAGE_BYTES // (2 * WIDTH), WIDTH))
        while (obj := engine.pool.allocate(page, torch.bfloat16, MemoryFormat.EC_TD)) is not None:
            pressing.append(obj)
        assert engine.state_of(CAT) is EntryState.RESIDENT

    with after(engine.connector, "has_cache_item", press):
        engine.ask("warm", CAT)
    assert pressing
    for obj in pressing:
        obj.ref_count_down()
    assert engine.encoder_runs(CAT) == 1


def test_invariant_01_a_pin_that_no_load_used_ends_with_the_pass(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.evict_device()
    engine.settle()
    request = engine.add("never scheduled", [CAT])
    assert engine.connector.ensure_cache_available(request, 0)
    assert engine.connector.has_cache_item(CAT.identifier)
    engine.abort("never scheduled")
    engine.step()
    assert engine.leases_of(CAT) == 0


def test_invariant_01_what_is_encoded_while_it_is_staging_reserves_no_save(
    engine: EngineLoop, tier: WatchedTier
) -> None:
    clock = engine.admission._clock = Clock()
    store_below(engine, CAT)
    saves, used = len(engine.saves()), engine.pool.used_bytes
    with tier.held("read") as (gate,):
        engine.add("late", [CAT])
        engine.step()
        gate.wait_arrived()
        clock.advance(100.0)
        engine.run()
        assert engine.encoder_runs(CAT) == 2
        assert len(engine.saves()) == saves
        assert engine.pool.used_bytes == used + PAGE_BYTES, "the one that is staging"
        assert engine.state_of(CAT) is EntryState.STAGING
    wait_until(lambda: engine.state_of(CAT) is EntryState.RESIDENT, "staging ends by itself")


# -- 2: items without pixels -------------------------------------------------------------------------------------------


def test_invariant_02_an_unknown_item_without_pixels_fails_its_request_alone(engine: EngineLoop) -> None:
    engine.add("blind", [4, BLIND_CAT])
    engine.add("sees", [4, DOG], max_tokens=4)
    engine.run()
    assert engine.ended == {"blind": FinishReason.ERROR, "sees": FinishReason.LENGTH}
    assert engine.encoder_runs(CAT) == 0
    engine.ask("goes on", CAT)


def test_invariant_02_the_connector_names_the_request_once_and_does_not_let_it_go_on(engine: EngineLoop) -> None:
    request = engine.add("blind", [BLIND_CAT])
    wait_until(lambda: engine.connector.take_unavailable_requests() or step(engine, request), "it is named")
    assert engine.connector.take_unavailable_requests() == set()
    assert engine.connector.ensure_cache_available(request, 0) is False
    engine.abort("blind")


def step(engine: EngineLoop, request: Any) -> None:
    assert engine.connector.ensure_cache_available(request, 0) is False


def test_invariant_02_without_pixels_what_is_held_is_served_from_every_tier(engine: EngineLoop) -> None:
    engine.ask("cold", CAT)
    engine.ask("on the device", BLIND_CAT)
    engine.evict_device()
    engine.ask("in the pool", BLIND_CAT)
    engine.evict_device()
    engine.drop_from_pool(CAT)
    engine.ask("below", BLIND_CAT)
    assert engine.encoder_runs(CAT) == 1


def test_invariant_02_without_pixels_damaged_bytes_fail_the_request(engine: EngineLoop, tier: WatchedTier) -> None:
    store_below(engine, CAT)
    tier.damage(CAT.identifier)
    engine.add("blind", [BLIND_CAT])
    engine.run()
    assert engine.ended["blind"] is FinishReason.ERROR


def test_invariant_02_pixels_behind_an_address_are_pixels(engine: EngineLoop) -> None:
    """With `--mm-processor-cache-type shm` only the workers see tensors."""
    engine.ask("cold", CAT, kwargs_of=address_item)
    assert engine.encoder_runs(CAT) == 1


def test_invariant_02_without_pixels_and_without_a_fingerprint_the_request_fails(
    engine: EngineLoop, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.bin").symlink_to("/proc/self/mem")  # a file that cannot be read
    adapter = LoRARequest("stamps", 1, str(tmp_path))
    clock = engine.admission._clock = Clock()
    engine.add("blind", [BLIND_CAT], adapter=adapter)
    engine.add("sees", [CAT], adapter=adapter)
    engine.step()
    clock.advance(100.0)
    engine.run()
    assert engine.ended == {"blind": FinishReason.ERROR, "sees": FinishReason.LENGTH}
    assert engine.saves() == []


def test_invariant_02_without_pixels_an_item_is_held_against_the_evictions_of_its_own_request(
    tier: WatchedTier,
) -> None:
    """The device holds it when the request is looked at, and evicts it for the request's first image."""
    with EngineLoop(EngineOptions(device_rows=24), [tier]) as engine:
        engine.ask("cold", CAT)
        engine.ask("keeps the order of eviction", Image("fox", rows=16))
        engine.settle()
        engine.ask("blind", Image("owl", rows=16), BLIND_CAT)
        assert engine.encoder_runs(CAT) == 1
        # And the same with bytes that are only below.
        engine.ask("cold again", CAT)
        engine.ask("order", Image("hen", rows=16))
        engine.drop_from_pool(CAT)
        engine.ask("blind again", Image("emu", rows=16), BLIND_CAT)
        assert engine.encoder_runs(CAT) == 1


def test_invariant_02_a_running_request_whose_item_a_reset_has_voided_fails_alone(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(batch_tokens=16), [tier]) as engine:
        store_below(engine, CAT)
        request = engine.add("blind", [24, BLIND_CAT])
        engine.run(until=lambda: request.num_computed_tokens > 0)
        engine.update_weights()
        engine.run()
        assert engine.ended["blind"] is FinishReason.ERROR
        engine.ask("goes on", CAT)
        assert engine.encoder_runs(CAT) == 2


def test_invariant_02_without_pixels_no_restore_is_too_slow(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(skip_slow_restores=True), [tier]) as engine:
        store_below(engine, CAT, DOG)
        engine.ask("measures a restore", DOG)
        engine.board.rank(0).set_gauge(RankGauge.ENCODE_SECONDS_PER_TOKEN, 1e-12)
        engine.add("blind", [BLIND_CAT])
        engine.run()
        assert engine.ended["blind"] is FinishReason.LENGTH


# -- 3: client ids are not content hashes ------------------------------------------------------------------------------


def mine(picture: str, rows: int = 8, modality: str = "image") -> Image:
    return Image(picture, rows, client_id="my-picture", modality=modality)


def test_invariant_03_another_picture_of_another_size_under_a_clients_id_is_encoded(engine: EngineLoop) -> None:
    engine.ask("first", mine("cat"))
    engine.evict_device()
    engine.ask("same picture", mine("cat"))
    assert engine.encoded["my-picture"] == 1
    engine.evict_device()
    engine.ask("larger", mine("dog", rows=16))
    assert engine.encoded["my-picture"] == 2
    engine.evict_device()
    engine.ask("larger again", mine("dog", rows=16))
    assert engine.encoded["my-picture"] == 2, "the newest is what is kept"


def test_invariant_03_another_modality_under_a_clients_id_is_encoded(engine: EngineLoop) -> None:
    engine.ask("image", mine("cat"))
    engine.evict_device()
    engine.ask("video", mine("cat", modality="video"))
    assert engine.encoded["my-picture"] == 2


def test_invariant_03_client_ids_stay_out_of_the_lower_tiers(engine: EngineLoop, tier: WatchedTier) -> None:
    engine.ask("first", mine("cat"), DOG)
    engine.settle()
    assert tier.names() == {DOG.identifier}
    assert all(operation == "probe" for operation, _ in tier.threads if operation != "write")
    assert tier.calls["probe"] == 1, "nor are they asked for there"


def test_invariant_03_client_ids_are_kept_below_on_request_and_still_must_match(tier: WatchedTier) -> None:
    options = EngineOptions(settings={"persist_client_ids": True})
    with EngineLoop(options, [tier]) as engine:
        engine.ask("first", mine("cat"))
    assert tier.names() == {"my-picture"}
    with EngineLoop(options, [tier]) as engine:
        engine.ask("larger", mine("dog", rows=16))
        assert engine.encoded["my-picture"] == 1
    with EngineLoop(options, [tier]) as engine:
        engine.ask("restored", mine("dog", rows=16))
        assert not engine.encoded


@needs_size_checks
@pytest.mark.parametrize("first, second", [(8, 16), (16, 8)])
def test_invariant_03_two_sizes_under_one_id_in_one_long_prompt(engine: EngineLoop, first: int, second: int) -> None:
    """The second one's bytes are in the pool, and the first one is asked about."""
    engine.ask("cold", mine("dog", rows=second))
    engine.evict_device()
    engine.settle()
    engine.add("both", [mine("cat", rows=first), 60, mine("dog", rows=second)])
    engine.run()
    assert engine.ended["both"] in (FinishReason.LENGTH, FinishReason.ERROR)  # vLLM itself refuses where it sees both
    engine.ask("goes on", CAT)


def test_invariant_03_two_sizes_under_one_id_in_two_chunks_with_evictions_between(tier: WatchedTier) -> None:
    with EngineLoop(EngineOptions(device_rows=16, batch_tokens=20), [tier]) as engine:
        engine.add("both", [mine("cat", rows=8), 20, Image("fox", rows=16), 20, mine("dog", rows=16)], max_tokens=2)
        engine.run(until=lambda: len(engine.encoded) == 2)
        engine.settle()  # the first one's bytes would be served by now
        engine.run()
        assert engine.ended["both"] in (FinishReason.LENGTH, FinishReason.ERROR)
        engine.ask("goes on", CAT)


@needs_size_checks
def test_invariant_03_two_sizes_under_one_id_in_two_requests_of_one_pass(engine: EngineLoop) -> None:
    engine.ask("cold", mine("dog", rows=16))
    engine.evict_device()
    engine.settle()
    engine.add("one", [mine("cat", rows=8)])
    engine.add("two", [mine("dog", rows=16)])
    engine.run()
    assert engine.ended["one"] is FinishReason.LENGTH
    engine.ask("goes on", CAT)


# -- 6: the device is asked last ---------------------------------------------------------------------------------------


def test_invariant_06_what_the_device_holds_is_neither_staged_nor_leased_nor_waited_for(
    engine: EngineLoop, tier: WatchedTier
) -> None:
    engine.ask("cold", CAT)
    engine.drop_from_pool(CAT)
    calls = len(tier.threads)
    with tier.held("probe", "read"):
        engine.add("device hit", [2, CAT], max_tokens=3)
        assert engine.step().num_scheduled_tokens["device hit"] == 2 + CAT.rows
        assert engine.hierarchy.claimed_bytes == 0
        engine.run()
    assert len(tier.threads) == calls
    assert engine.encoder_runs(CAT) == 1
    assert engine.state_of(CAT) is None


def test_invariant_06_nor_with_a_manager_of_the_users_choice(tier: WatchedTier) -> None:
    stock = EngineOptions(manager="vllm.v1.core.encoder_cache_manager.EncoderCacheManager")
    with EngineLoop(stock, [tier]) as engine:
        assert not engine.residency.has_manager
        engine.ask("cold", CAT)
        engine.drop_from_pool(CAT)
        calls = len(tier.threads)
        engine.ask("device hit", CAT)
        assert len(tier.threads) == calls
        engine.evict_device()
        engine.ask("below", CAT)
        assert engine.encoder_runs(CAT) == 1
        assert engine.loads() == [CAT.identifier]
