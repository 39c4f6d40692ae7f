# SPDX-License-Identifier: Apache-2.0
"""Our connector under vllm-neuron's contract: each of its faults with our classes and without, restarts, pairs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.engine import FinishReason

from connector import vllm_neuron, vllm_versions
from connector.block_aware_manager import BlockAwareEncoderCacheManager
from connector.copy_thread import CopyThread
from connector.ec_connector import LMCacheNeuronECConnector
from connector.step_plan import LoadMapping, StepPlan
from storage_tiers.device_copy import CompiledScatterCopies
from storage_tiers.entry import EntryState
from tests.neuron.contract_plugin import ECLoadFailure
from tests.neuron.engine import NeuronLoop, NeuronOptions
from tests.neuron.items import video
from tests.scheduler.items import Image
from tests.scheduler.lower_tiers import WatchedTier
from tests.tiers.memory_tier import wait_until

A, B, C = (Image(name, 8) for name in "abc")
LONG = 600.0
ALONE = {"hook": False, "counts_blocks": False}
"""`--ec-transfer-config`, and neither of the flags."""


def on_disk(tmp_path: Path) -> dict[str, Any]:
    return {"local_disk": f"file://{tmp_path}/", "max_local_disk_size": 0.01}


def stored_in(directory: Path) -> int:
    return len(list(directory.glob("*.pt")))


# -- The two ways to run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_evicted_item_is_restored_and_not_encoded(alone: bool, asynchronous: bool, ranks: int) -> None:
    options = NeuronOptions(ranks=ranks, async_scheduling=asynchronous, **(ALONE if alone else {}))
    with NeuronLoop(options) as engine:
        engine.ask("1", A, video("clip", 4, 3))
        engine.settle()
        engine.evict_device()
        engine.ask("2", video("clip", 4, 3), A)
        assert engine.encoder_runs(A, video("clip", 4, 3)) == 2
        assert sorted(engine.loads()) == sorted([A.identifier, video("clip", 4, 3).identifier])
        assert engine.saves().count(A.identifier) == 1, "one rank saves, and once"


def test_after_a_restart_of_the_whole_nothing_is_encoded(tmp_path: Path) -> None:
    items = [Image(f"picture-{number}", 5) for number in range(6)] + [video("clip", 3, 5)]
    options = NeuronOptions(ranks=2, settings=on_disk(tmp_path))
    with NeuronLoop(options, tiers=None) as engine:
        engine.ask("1", *items[:3])
        engine.ask("2", *items[3:])
        engine.settle()
        assert engine.encoder_runs(*items) == len(items)
    assert stored_in(tmp_path) == len(items)
    with NeuronLoop(options, tiers=None) as engine:
        engine.ask("1", *items[3:])
        engine.ask("2", *items[:3])
        assert not any(rank.encoded for rank in engine.runners)
        assert all(len(rank.worker.model_runner.gathered) == len(items) for rank in engine.runners)


@pytest.mark.parametrize("alone_consumer", [False, True])
def test_what_a_producer_has_encoded_a_consumer_restores(tmp_path: Path, alone_consumer: bool) -> None:
    """Two engines over one directory: the encoder of the second never runs."""
    items = [A, B, video("clip", 3, 5)]
    with NeuronLoop(NeuronOptions(role="ec_producer", settings=on_disk(tmp_path)), tiers=None) as producer:
        producer.add("1", items)
        for _ in range(4):
            producer.step()
        producer.abort("1")
        producer.step()
        producer.settle()
        assert producer.encoder_runs(*items) == 3
    assert stored_in(tmp_path) == 3
    more = ALONE if alone_consumer else {}
    with NeuronLoop(NeuronOptions(role="ec_consumer", settings=on_disk(tmp_path), **more), tiers=None) as consumer:
        consumer.ask("1", *items)
        assert not consumer.encoded


def test_a_consumer_without_an_encoder_waits_for_what_the_producer_is_about_to_store() -> None:
    """The request comes before the item does: it waits, and is served; one for what never comes fails alone."""
    tier = WatchedTier()
    options = NeuronOptions(language_model_only=True, settings={"staging_deadline_seconds": 1.0})
    with NeuronLoop(options, [tier]) as engine:
        engine.add("early", [A])
        for _ in range(20):
            engine.step()
        with NeuronLoop(NeuronOptions(), [tier]) as producer:
            producer.ask("1", A)
        engine.run()
        assert engine.ended == {"early": FinishReason.LENGTH}
        engine.add("never", [B])
        engine.run()
        assert engine.ended["never"] is FinishReason.ERROR
        assert not engine.encoded


def test_the_uni_executor_shares_the_plan_with_the_runner() -> None:
    """The runner writes into the very mapping that the scheduler has planned."""
    with NeuronLoop(NeuronOptions(copies_metadata=False, **ALONE)) as engine:
        engine.ask("1", A)
        engine.settle()
        engine.evict_device()
        engine.ask("2", A)
        assert engine.encoder_runs(A) == 1


def test_every_rank_of_sixteen_restores_the_one_copy() -> None:
    with NeuronLoop(NeuronOptions(ranks=16)) as engine:
        engine.ask("1", A)
        engine.settle()
        assert len(engine._entries()) == 1
        engine.evict_device()
        engine.ask("2", A)
        assert [rank.encoded[A.identifier] for rank in engine.runners] == [1] * 16
        assert all(len(rank.worker.model_runner.gathered) == 3 for rank in engine.runners)


# -- Each fault of the plugin's, without our classes and with them ----------------------------------------------------


def fill_with_small_items(options: NeuronOptions) -> NeuronLoop:
    """Twenty items of 5 tokens in blocks of 8, against a budget of 32 tokens: 6 by tokens, 4 by blocks."""
    engine = NeuronLoop(options)
    try:
        for number in range(20):
            engine.ask(f"{number}", Image(f"small-{number}", 5))
    except RuntimeError:
        engine.close()
        raise
    return engine


def test_fault_blocks_run_out() -> None:
    with pytest.raises(RuntimeError, match="Encoder cache full"):
        fill_with_small_items(NeuronOptions(device_rows=32, **ALONE))
    with fill_with_small_items(NeuronOptions(device_rows=32)) as engine:
        assert engine.scheduler.encoder_cache_manager.cache_size == 4
        engine.settle()
        engine.ask("again", Image("small-0", 5))
        assert engine.encoder_runs(Image("small-0", 5)) == 1


def test_fault_the_step_thread_sleeps_for_held_blocks() -> None:
    """Two items of two blocks each, where only one fits: the second waits out the first's hold time."""
    large = Image("large", 32)
    sleeper = NeuronLoop(NeuronOptions(device_rows=32, min_hold_time_ms=100.0, **ALONE))
    sleeper.ask("1", A)
    sleeper.ask("2", large)
    assert sleeper.runners[0].cache.slept_seconds > 0
    sleeper.close()
    with NeuronLoop(NeuronOptions(device_rows=32, min_hold_time_ms=100.0)) as engine:
        engine.ask("1", A)
        engine.ask("2", large)
        assert engine.runners[0].cache.slept_seconds == 0


def test_fault_a_videos_whole_frames_take_more_blocks_than_its_tokens() -> None:
    """Frames of 5 tokens, one to a block of 8: 4 blocks for 20 tokens, which densely are 3."""
    clips = [video(f"clip-{number}", 4, 5) for number in range(3)]
    options = NeuronOptions(device_rows=48)
    with (
        mock.patch.object(vllm_neuron._BlockCounting, "manager_class", BlockAwareEncoderCacheManager),
        pytest.raises(RuntimeError, match="Encoder cache full"),
    ):
        engine = NeuronLoop(options)
        try:
            engine.ask("1", clips[0])
            engine.ask("2", clips[1])
        finally:
            engine.close()
    with NeuronLoop(options) as engine:
        for number, clip in enumerate([*clips, *clips]):
            engine.ask(f"{number}", clip)
            engine.settle()
        assert engine.encoder_runs(*clips) == 3


def test_fault_the_device_refuses_eager_writes() -> None:
    """The plugin's own `put` dies of it. A restore goes through one graph, compiled once, before the first step."""
    torch._dynamo.utils.counters.clear()
    with NeuronLoop(NeuronOptions(refuse_eager_writes=True)) as engine:
        cache = engine.runners[0].cache
        with pytest.raises(RuntimeError, match="in-place writes"):
            cache.put("by hand", torch.zeros(8, cache.fat_dim, dtype=cache.dtype))
        cache.free("by hand")
        copies = engine.runners[0].connector._plugin_copies
        assert isinstance(copies, CompiledScatterCopies)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        for number, rows in enumerate([8, 3, 30, 17, 64, 1]):
            item = Image(f"picture-{number}", rows)
            engine.ask(f"{number}", item)
            engine.settle()
            engine.evict_device()
            engine.ask(f"{number} again", item)
            assert engine.encoder_runs(item) == 1
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "nothing is compiled once it runs"


def test_fault_a_failed_load_ends_the_engine(tmp_path: Path) -> None:
    """A connector that finds a bad file too late can only tell the runner, who dies; ours has looked before."""

    def ask_with_the_file_damaged(options: NeuronOptions) -> NeuronLoop:
        with NeuronLoop(options, tiers=None) as engine:
            engine.ask("1", A)
            engine.settle()
        (file,) = tmp_path.glob("*.pt")
        damaged = bytearray(file.read_bytes())
        damaged[7] ^= 1
        file.write_bytes(damaged)
        engine = NeuronLoop(options, tiers=None)
        engine.ask("1", A)
        return engine

    options = NeuronOptions(settings=on_disk(tmp_path))
    with ask_with_the_file_damaged(options) as engine:
        assert engine.encoder_runs(A) == 1
    too_late = mock.patch.object(LMCacheNeuronECConnector, "wait_for_load", lambda _: {A.identifier})
    with too_late, pytest.raises(ECLoadFailure, match=A.identifier), NeuronLoop(options, tiers=None) as engine:
        engine.ask("1", A)


def test_fault_an_item_that_the_plan_does_not_load_is_skipped_in_silence() -> None:
    """The answer would be wrong, and nobody would know; every item that is admitted as a hit stands in our plan."""
    nothing = mock.patch.object(StepPlan, "load", property(lambda _: LoadMapping()))
    engine = NeuronLoop(NeuronOptions(**ALONE))
    engine.ask("1", A)
    engine.settle()
    with nothing:
        engine.evict_device()
        engine.ask("2", A)
    assert ("2", A.identifier) in engine.runners[0].unfilled
    engine.close()
    with NeuronLoop(NeuronOptions(**ALONE)) as engine:
        engine.ask("1", A)
        engine.settle()
        engine.evict_device()
        engine.ask("2", A)


def test_fault_blocks_are_freed_before_the_connector_is_called() -> None:
    """What is evicted is gone when the runner calls a connector: only a worker class sees it first, and spills it."""
    late: list[bool] = []
    original = LMCacheNeuronECConnector.start_load_caches

    def looks(self: Any, encoder_cache: Any, *args: Any, **kwargs: Any) -> None:
        late.append(encoder_cache.contains(A.identifier))
        original(self, encoder_cache, *args, **kwargs)

    with (
        mock.patch.object(LMCacheNeuronECConnector, "start_load_caches", looks),
        NeuronLoop(NeuronOptions(**ALONE)) as engine,
    ):
        engine.ask("1", A)
        engine.evict_device()
        assert late == [True, False]
    with NeuronLoop(NeuronOptions(settings={"spill_policy": "on_evict", "max_dirty_seconds": LONG})) as engine:
        engine.ask("1", A)
        assert engine.ledger.counts().get("save_copied", 0) == 0
        engine.evict_device()
        wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == 1, "it was spilled as it left")
        engine.ask("2", A)
        assert engine.encoder_runs(A) == 1
        engine.runners[0].connector.before_reset()  # the filler, too, before the engine ends


def evict_while_another_decodes(engine: NeuronLoop) -> list[str]:
    """Have the worker be told of A's eviction by a step that only decodes; the connector calls of that step."""
    engine.ask("1", A)
    engine.add("2", [4], max_tokens=8)
    engine.step()
    engine.scheduler.reset_encoder_cache()  # the scheduler's half alone
    engine.scheduler.encoder_cache_manager.freed.append(A.identifier)
    called: list[str] = []
    connector = engine.runners[0].connector
    for name in ("bind_connector_metadata", "start_load_caches", "wait_for_load", "clear_connector_metadata"):
        setattr(connector, name, lambda *_, name=name, **__: called.append(name))
    output = engine.step()
    for name in ("bind_connector_metadata", "start_load_caches", "wait_for_load", "clear_connector_metadata"):
        delattr(connector, name)
    assert output.free_encoder_mm_hashes == [A.identifier] and output.total_num_scheduled_tokens == 1
    assert A.identifier not in engine.runners[0].encoder_cache
    return called


def test_fault_a_step_that_only_decodes_calls_no_connector() -> None:
    """An eviction can come with such a step, and is carried out there; only the hook sees it, and spills first."""
    settings = {"spill_policy": "on_evict", "max_dirty_seconds": LONG, "reset_invalidates": False}
    with NeuronLoop(NeuronOptions(settings=settings)) as engine:
        saved_before = engine.ledger.counts().get("save_copied", 0)
        assert evict_while_another_decodes(engine) == []
        wait_until(lambda: engine.ledger.counts().get("save_copied", 0) == saved_before + 1, "it was spilled")
        engine.run()
        engine.ask("3", A)
        assert engine.encoder_runs(A) == 1
    with NeuronLoop(NeuronOptions(settings=settings, **ALONE)) as engine:
        assert evict_while_another_decodes(engine) == []


def test_fault_a_plan_that_goes_out_with_a_step_that_only_decodes_is_dropped() -> None:
    """A load whose request is preempted in the same pass: it waits until a prompt goes on."""
    held_back = 0
    options = NeuronOptions(
        device_rows=32, num_blocks=64, policy="priority", batch_tokens=16, block_size=4, kv_blocks=12,
        scheduler={"long_prefill_token_threshold": 8}, **ALONE,
    )  # fmt: skip
    for text in (9, 13):
        for prompt in range(2, 9):
            with NeuronLoop(options) as engine:
                engine.ask("0", B)
                engine.settle()
                engine.evict_device()
                engine.add("low", [text, 32 - text, B], max_tokens=2, priority=3)
                engine.step()
                engine.add("high", [prompt], max_tokens=16, priority=0)
                while engine.scheduler.has_requests():
                    output = engine.step()
                    held_back += bool(engine.side._loads and output.total_num_scheduled_tokens)
                assert engine.encoder_runs(B) == 1
    assert held_back, "the case did not come up"


def test_loads_stay_with_the_scheduler_until_a_prompt_goes_on() -> None:
    """The same at its seam: such a step's plan is empty, and the next prefill's is not."""
    decoding = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached_requests({"other": 9}))
    prefilling = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached_requests({"1": 3}))
    with NeuronLoop(NeuronOptions(**ALONE)) as engine:
        engine.add("1", [4, A, 90])
        engine.step()
        assert not engine.side._will_be_carried_out(decoding)  # type: ignore[arg-type]
        assert engine.side._will_be_carried_out(prefilling)  # type: ignore[arg-type]
        engine.run()
    with NeuronLoop(NeuronOptions()) as hooked:
        assert hooked.side._will_be_carried_out(SimpleNamespace(total_num_scheduled_tokens=1))  # type: ignore[arg-type]


def cached_requests(computed: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(req_ids=list(computed), num_computed_tokens=list(computed.values()))


@pytest.mark.parametrize("alone", [False, True])
def test_fault_a_preempted_request_that_ends_while_it_waits_is_run_again(alone: bool) -> None:
    """By vLLM 0.24, which dies of it: alone, such a request waits for nothing there; our scheduler class forgets it."""
    tier = WatchedTier()
    with NeuronLoop(NeuronOptions(**(ALONE if alone else {})), [tier]) as engine:
        engine.ask("0", A)
        engine.settle()
        engine.evict_device()
        engine.drop_from_pool(A)
        with tier.held("read"):
            request = engine.add("1", [A, 8])
            engine.step()
            assert not engine.connector.ensure_cache_available(request, 0)
            request.num_preemptions = 1
            waits = not alone or vllm_versions.announces_running_requests()
            assert engine.connector.ensure_cache_available(request, 0) is not waits
        engine.run()


# -- Copies that are slow, or fail ------------------------------------------------------------------------------------


def test_a_slow_copy_thread_never_copies_blocks_of_the_next_item() -> None:
    """By the transfer config alone nobody tells when blocks are freed: the step waits for what it has begun."""
    original = CopyThread._carry_out

    def late(self: Any, copy: Any) -> None:
        if threading.current_thread() is self._thread:
            time.sleep(0.1)
        original(self, copy)

    submit = CopyThread.submit

    def slow_submit(self: Any, *args: Any) -> bool:
        taken = submit(self, *args)
        time.sleep(0.02)  # so that the copy thread is the quicker one
        return taken

    with (
        mock.patch.object(CopyThread, "_carry_out", late),
        mock.patch.object(CopyThread, "submit", slow_submit),
        NeuronLoop(NeuronOptions(device_rows=16, num_blocks=3, **ALONE)) as engine,
    ):
        for name in ("1", "2"):
            for item in (A, B, C):
                engine.ask(f"{name} {item.picture}", item)
        assert engine.encoder_runs(A, B, C) == 3


@pytest.mark.parametrize("alone", [False, True])
def test_a_device_without_events_is_copied_from_within_the_step(alone: bool) -> None:
    no_events = mock.patch("connector.copy_thread._event_after", side_effect=RuntimeError("no such thing here"))
    with no_events, NeuronLoop(NeuronOptions(**(ALONE if alone else {}))) as engine:
        engine.ask("1", A)
        engine.settle()
        engine.evict_device()
        engine.ask("2", A)
        assert engine.encoder_runs(A) == 1
        assert ("device", "no_events") in engine.faults()


@pytest.mark.parametrize("alone", [False, True])
def test_a_copy_that_fails_in_any_way_loses_its_item_and_no_more(alone: bool) -> None:
    fails = mock.patch("connector.copy_thread._copy_rows", side_effect=MemoryError("no room"))
    with NeuronLoop(NeuronOptions(**(ALONE if alone else {}))) as engine:
        with fails:
            engine.ask("1", A)
            engine.settle()
        engine.evict_device()
        engine.ask("2", A)
        assert engine.encoder_runs(A) == 2
        engine.settle()
        engine.evict_device()
        engine.ask("3", A)
        assert engine.encoder_runs(A) == 2, "the thread lives"
        assert engine.faults() == {("device", "copy_failed"): 1}


def test_a_stop_of_the_worker_saves_what_is_dirty(tmp_path: Path) -> None:
    options = NeuronOptions(settings={**on_disk(tmp_path), "spill_policy": "on_evict", "max_dirty_seconds": LONG})
    engine = NeuronLoop(options, tiers=None)
    engine.ask("1", A)
    assert stored_in(tmp_path) == 0
    engine.runners[0].shutdown()
    assert engine.runners[0].worker.is_shut_down
    engine.settle()
    engine.scheduler.shutdown()
    assert stored_in(tmp_path) == 1


def test_a_runner_without_an_encoder_cache_runs_as_if_we_were_not_there() -> None:
    engine = NeuronLoop(NeuronOptions())
    runner = engine.runners[0].worker.model_runner
    with mock.patch.object(runner, "execute_model", side_effect=lambda output: output) as executed:
        cache, runner.encoder_cache = runner.encoder_cache, None
        engine.add("1", [4])
        output = engine.scheduler.schedule()
        assert engine.runners[0].execute(output) == output
        assert executed.call_args.args[0].ec_connector_metadata is output.ec_connector_metadata
        runner.encoder_cache = cache
    engine.close()


# -- What ends a request, and not the engine --------------------------------------------------------------------------


def test_an_item_of_another_size_under_the_same_id_fails_its_request_alone() -> None:
    """VLLM 0.24 would serve the first one's rows."""
    small, large = Image("a", 8, client_id="x"), Image("b", 16, client_id="x")
    for first, second in ((small, large), (large, small)):
        with NeuronLoop(NeuronOptions(device_rows=32)) as engine:
            engine.ask("1", first)
            engine.add("2", [second])
            engine.add("both", [Image("c", 8, client_id="y"), Image("d", 16, client_id="y")])
            engine.run()
            assert engine.ended == {"1": FinishReason.LENGTH, "2": FinishReason.ERROR, "both": FinishReason.ERROR}


def test_a_frame_larger_than_a_block_fails_its_request_alone() -> None:
    with NeuronLoop(NeuronOptions()) as engine:
        engine.add("large frames", [video("clip", 2, 9)])
        engine.add("small", [A])
        engine.run()
        assert engine.ended == {"large frames": FinishReason.ERROR, "small": FinishReason.LENGTH}


def test_a_video_whose_grid_the_scheduler_cannot_see_is_served_all_the_same() -> None:
    """Counted as the most that it may take, and no more than there is."""
    clip = video("clip", 5, 8)
    with mock.patch.object(vllm_neuron, "_frames_of", lambda _: None), NeuronLoop(NeuronOptions()) as engine:
        for number, item in enumerate([clip, A, B, clip]):
            engine.ask(f"{number}", item)
            engine.settle()
        assert engine.encoder_runs(clip, A, B) == 3


def test_an_item_larger_than_the_device_fails_its_request_alone() -> None:
    """By its whole frames: 9 blocks of 8, where 8 are; its 45 tokens are within vLLM's budget of 64."""
    with NeuronLoop(NeuronOptions(device_rows=64)) as engine:
        engine.add("large", [2, video("large", 9, 5)])
        engine.add("small", [A])
        engine.run()
        assert engine.ended == {"large": FinishReason.ERROR, "small": FinishReason.LENGTH}


def test_an_item_without_pixels_that_nobody_has_fails_its_request_alone() -> None:
    with NeuronLoop(NeuronOptions()) as engine:
        engine.add("blind", [Image("unseen", has_pixels=False)])
        engine.add("sighted", [A])
        engine.run()
        assert engine.ended == {"blind": FinishReason.ERROR, "sighted": FinishReason.LENGTH}
        assert vllm_versions.fails_unavailable_requests() or engine.connector.take_unavailable_requests() == set()


# -- Resets -----------------------------------------------------------------------------------------------------------


def test_after_a_weight_update_nothing_old_is_served() -> None:
    with NeuronLoop(NeuronOptions(settings={"spill_policy": "on_evict", "max_dirty_seconds": LONG})) as engine:
        engine.ask("1", A)
        engine.update_weights()
        engine.ask("2", A)
        assert engine.encoder_runs(A) == 2
        engine.runners[0].connector.before_reset()
        engine.settle()
        assert engine.state_of(A) is EntryState.RESIDENT
