# SPDX-License-Identifier: Apache-2.0
"""Device blocks under vLLM's real scheduler: what is evicted is spilled, what is asked for again is restored."""

import logging
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector import engine_checks
from storage_tiers.device_blocks import DeviceBlockCache
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import Image
from tests.scheduler.versions import needs_named_managers
from tests.tiers.memory_tier import wait_until

MANAGER = "connector.BlockAwareEncoderCacheManager"
LONG = 3600.0


def options(device_rows: int = 28, block_size: int = 4, **behaviour: object) -> EngineOptions:
    """Blocks and the manager that counts them."""
    return EngineOptions(
        in_blocks=True,
        manager=MANAGER,
        device_rows=device_rows,
        settings={"device_block_size": block_size, **behaviour},
    )


def blocks_of(engine: EngineLoop) -> DeviceBlockCache:
    mapping = engine.runners[0].blocks
    assert mapping is not None and mapping.blocks is not None
    return mapping.blocks


def assert_all_in_blocks(engine: EngineLoop, *allowed: str) -> None:
    """No item had to live outside of blocks, but for the `allowed` reasons, and the books balance."""
    for runner in engine.runners:
        assert runner.blocks is not None
        assert set(runner.blocks.counts) <= set(allowed)
        cache = runner.blocks.blocks
        if cache is not None:
            assert cache.num_active_blocks + cache.num_free_blocks + cache.num_held_blocks == cache.num_blocks - 1


def padding_case(engine: EngineLoop) -> None:
    """The field's case: 20 distinct items of 5 tokens, a budget of 10 of them, then the first again."""
    pictures = [Image(f"picture-{number}", 5) for number in range(20)]
    for number, picture in enumerate(pictures):
        engine.ask(f"first-{number}", picture)
        engine.settle()
    assert engine.encoder_runs(*pictures) == 20
    engine.ask("again", pictures[0])
    engine.run()
    assert engine.encoder_runs(*pictures) == 20, "the first is restored, not encoded"
    assert engine.runners[0].gathered[-1][0] == "again"


def test_the_padding_case_of_the_field() -> None:
    """8 blocks of 4 tokens, 7 of them for items: 3 items fit, of the 10 that the budget of 50 tokens allows."""
    chosen = options(50, 4, device_num_blocks=8)
    with EngineLoop(chosen) as engine:
        padding_case(engine)
        assert_all_in_blocks(engine)
        assert blocks_of(engine).num_blocks == 8


def test_the_padding_case_with_vllms_own_way_of_counting() -> None:
    """For contrast: it admits what no block holds, and only plain tensors keep that from ending the engine."""
    chosen = EngineOptions(in_blocks=True, device_rows=50, settings={"device_block_size": 4, "device_num_blocks": 8})
    with EngineLoop(chosen) as engine:
        padding_case(engine)
        mapping = engine.runners[0].blocks
        assert mapping is not None
        assert mapping.counts["no_free_blocks"] > 0


def test_what_is_evicted_dirty_is_spilled_and_restored() -> None:
    """on_evict: nothing is copied while it stays; at its eviction it is copied before its blocks are used again."""
    a, b, c = (Image(name, 12) for name in "abc")
    with EngineLoop(options(24, spill_policy="on_evict", max_dirty_seconds=LONG)) as engine:
        engine.ask("1", a)
        engine.ask("2", b)
        assert engine.ledger.num_outstanding == 2
        assert engine.ledger.counts().get("save_copied", 0) == 0
        engine.ask("3", c)
        wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == 1, "the evicted item is in the pool")
        engine.ask("4", a)
        assert engine.encoder_runs(a) == 1
        assert_all_in_blocks(engine)
        for runner in engine.runners:
            assert runner.connector._worker is not None
            runner.connector._worker._copies.expedite(1 << 40)
        engine.settle()


def test_a_dirty_item_is_saved_when_it_has_grown_old_though_the_engine_idles() -> None:
    a = Image("a", 12)
    with EngineLoop(options(24, spill_policy="on_evict", max_dirty_seconds=0.2)) as engine:
        engine.ask("1", a)
        wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == 1, "an old item is saved without a step")


def test_at_a_stop_the_dirty_items_are_flushed() -> None:
    a = Image("a", 12)
    engine = EngineLoop(options(24, spill_policy="on_evict", max_dirty_seconds=LONG))
    engine.ask("1", a)
    engine.run()
    assert engine.ledger.num_outstanding == 1
    for runner in engine.runners:
        runner.connector.shutdown()
    wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == 1, "the stop has flushed it")
    engine.scheduler.shutdown()


def test_after_a_reset_dirty_items_do_not_keep_their_blocks() -> None:
    """A reset reaches the runner's cache alone; what waits to be copied is void, and is copied soon."""
    a, b = Image("a", 12), Image("b", 12)
    with EngineLoop(options(24, spill_policy="on_evict", max_dirty_seconds=LONG)) as engine:
        engine.ask("1", a)
        engine.ask("2", b)
        engine.reset_encoder_cache()
        cache = blocks_of(engine)
        assert cache.num_held_blocks == 6
        engine.ask("3", 4)  # any step will do
        wait_until(lambda: cache.can_allocate(6), "all blocks are free again")
        engine.settle()


def test_new_items_beyond_a_steps_bytes_are_saved_in_later_steps() -> None:
    pictures = [Image(f"picture-{number}", 8) for number in range(3)]
    with EngineLoop(options(32, save_bytes_per_step=1, max_dirty_seconds=LONG)) as engine:
        for number, picture in enumerate(pictures):
            engine.add(f"{number}", [picture])
        engine.step()
        wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == 1, "one is always taken")
        assert engine.ledger.num_outstanding == 2
        engine.run()
        for number in range(4):
            engine.ask(f"later-{number}", 3)
        wait_until(lambda: engine.ledger.num_outstanding == 0, "the others followed")


def test_invariant_8_blocks_with_a_copy_in_flight_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that hangs holds its blocks; the item that needs them lives as a plain tensor, and both are right."""
    a, b = Image("a", 24), Image("b", 24)
    with EngineLoop(options(24)) as engine:
        copies = engine.runners[0].connector._worker._copies  # type: ignore[union-attr]
        taken = []
        monkeypatch.setattr(copies, "spill", lambda hashes: 0)
        monkeypatch.setattr(copies, "submit", lambda save, source, delay=0.0: taken.append((save, source)) or True)
        engine.ask("1", a)
        monkeypatch.undo()
        engine.ask("2", b)
        (save, source), *_ = taken
        held = torch.cat(source.views).clone()
        mapping = engine.runners[0].blocks
        assert mapping is not None and mapping.counts["no_free_blocks"] == 1
        assert torch.equal(torch.cat(source.views), held)
        assert copies.submit(save, source)
        engine.settle()
        engine.ask("3", a)
        assert engine.encoder_runs(a) == 1


@pytest.mark.parametrize("policy", ["write_behind", "on_evict"])
@given(seed=st.integers(0, 2**32 - 1), block_size=st.sampled_from([3, 4, 16]), ranks=st.sampled_from([1, 2]))
@settings(max_examples=12, deadline=None)
def test_random_workloads_stay_in_blocks_and_encode_once(policy: str, seed: int, block_size: int, ranks: int) -> None:
    rng = random.Random(seed)
    chosen = EngineOptions(
        in_blocks=True,
        manager=MANAGER,
        device_rows=64,
        ranks=ranks,
        settings={"device_block_size": block_size, "spill_policy": policy, "max_dirty_seconds": 0.3},
    )
    pictures = [Image(f"picture-{number}", rng.choice([1, 5, 16, 33])) for number in range(12)]
    with EngineLoop(chosen) as engine:
        order = pictures * 3
        rng.shuffle(order)
        for number, picture in enumerate(order):
            engine.add(f"{number}", [picture])
            if rng.random() < 0.6:
                engine.run()
                engine.settle()
        engine.run()
        assert engine.encoder_runs(*pictures) == len(pictures)
        # An item evicted while the copy thread reads it holds its blocks that much longer.
        assert_all_in_blocks(engine, "no_free_blocks")
        engine.settle()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"in_blocks": True, "manager": None}, "the scheduler counts embeddings"),
        pytest.param(
            {"in_blocks": False, "manager": MANAGER}, "the worker keeps plain tensors", marks=needs_named_managers
        ),
    ],
)
def test_one_flag_without_the_other_works_and_warns(
    changed: dict[str, object], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_checks.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    a = Image("a", 12)
    with caplog.at_level(logging.WARNING), EngineLoop(EngineOptions(**changed)) as engine:  # type: ignore[arg-type]
        engine.ask("1", a)
        engine.settle()
        engine.evict_device()
        engine.ask("2", a)
        assert engine.encoder_runs(a) == 1
    assert any(said in record.getMessage() for record in caplog.records)
