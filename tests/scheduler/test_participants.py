# SPDX-License-Identifier: Apache-2.0
"""Invariants 12 and 16: which ranks take part, what is refused, and what never happens on the scheduler's thread."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.v1.engine import FinishReason

from connector import engine_checks, vllm_versions
from connector.step_plan import StepPlan, Transfer
from connector.worker_side import WorkerOptions, WorkerSide
from storage_tiers.entry import EntryState
from storage_tiers.transfer_board import TransferStatus
from tests.scheduler.engine_loop import EngineLoop, EngineOptions, vllm_config
from tests.scheduler.items import DTYPE, WIDTH, Image
from tests.scheduler.lower_tiers import WatchedTier
from tests.tiers.memory_tier import Clock, wait_until

CAT, DOG = Image("cat"), Image("dog", rows=16)


@pytest.fixture
def stored() -> WatchedTier:
    """A tier with an image in it."""
    tier = WatchedTier()
    with EngineLoop(EngineOptions(), [tier]) as engine:
        engine.ask("cold", CAT)
    return tier


# -- 12: who takes part ------------------------------------------------------------------------------------------------


def test_invariant_12_all_ranks_load_the_one_copy_that_rank_0_saved(stored: WatchedTier) -> None:
    with EngineLoop(EngineOptions(ranks=2), [stored]) as engine:
        engine.ask("restored", CAT)
        engine.ask("new", DOG)
        engine.evict_device()
        engine.ask("reloaded", DOG)
        assert [runner.encoded for runner in engine.runners] == [engine.encoded] * 2
        assert (engine.encoder_runs(CAT), engine.encoder_runs(DOG)) == (0, 1)
        engine.settle()
        assert stored.calls["write"] == 3, "the new image and the filler, once each"
        assert engine.ledger.counts()["load_copied"] == 2


def test_invariant_12_no_hit_before_every_participant_has_attached(stored: WatchedTier) -> None:
    with EngineLoop(EngineOptions(ranks=2), [stored], attach=False) as engine:
        engine.admission._clock = Clock()
        engine.start_workers(1)
        probes = stored.calls["probe"]
        engine.add("early", [CAT])
        for _ in range(5):
            assert engine.step().total_num_scheduled_tokens == 0
        assert engine.hierarchy.num_entries == 0
        assert stored.calls["probe"] == probes
        engine.start_workers(1)
        engine.run()
        assert not engine.encoded
        assert engine.ended["early"] is FinishReason.LENGTH


def test_invariant_12_where_a_participant_stays_away_items_are_encoded_and_still_saved(stored: WatchedTier) -> None:
    with EngineLoop(EngineOptions(ranks=2), [stored], attach=False) as engine:
        clock = engine.admission._clock = Clock()
        engine.start_workers(1)
        engine.add("early", [CAT, DOG])
        engine.step()
        clock.advance(100.0)
        engine.run()
        assert engine.encoder_runs(CAT, DOG) == 2
        engine.evict_device()
        engine.settle()
        assert engine.state_of(CAT) is EntryState.RESIDENT
        engine.ask("still early", CAT, DOG)
        assert engine.encoder_runs(CAT, DOG) == 4
        assert engine.loads() == []
        engine.start_workers(1)
        engine.evict_device()
        engine.ask("late", CAT, DOG)
        assert engine.encoder_runs(CAT, DOG) == 4


def test_invariant_12_a_load_is_held_until_the_last_rank_has_made_it(stored: WatchedTier) -> None:
    with EngineLoop(EngineOptions(ranks=2), [stored]) as engine:
        engine.add("warm", [CAT])
        engine.run(until=lambda: engine.state_of(CAT) is EntryState.RESIDENT)
        runners, engine.runners[1:] = list(engine.runners), []
        engine.run()
        engine.ledger.poll()
        assert engine.leases_of(CAT) == 1
        (plan,) = [plan for plan in engine.plans if plan.loads]
        engine.board.rank(1).set_status(plan.loads[0].slot, TransferStatus.DONE)
        wait_until(lambda: engine.leases_of(CAT) == 0, "both have reported")
        engine.runners[:] = runners


def test_invariant_12_prefill_context_parallel_ranks_take_part_and_later_stages_do_not() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=4, prefill_context_parallel_size=2, pipeline_parallel_size=3
        )
    )
    assert vllm_versions.participants(config) == 8
    del config.parallel_config.prefill_context_parallel_size  # an older vLLM
    assert vllm_versions.participants(config) == 4


def test_invariant_12_a_later_pipeline_stage_attaches_to_nothing_and_ignores_plans() -> None:
    with EngineLoop() as engine:
        options = WorkerOptions(
            engine_id=str(engine.vllm_config.ec_transfer_config.engine_id),
            dp_rank=0,
            owner_pids=[os.getpid()],
            rank=0,
            device=torch.device("cpu"),
            save_queue_bytes=1 << 20,
            populate_pool=False,
            takes_part=False,
        )
        side = WorkerSide(options)
        load = Transfer(0, "absent", engine.pool.segment.data_offset, 1, WIDTH, DTYPE)
        side.bind(StepPlan(1, engine.pool.segment.name, loads=(load,), saves=(load,)))
        cache: dict[str, torch.Tensor] = {}
        side.load(cache)
        side.save({"absent": torch.zeros(1, WIDTH, dtype=DTYPE)}, "absent")
        side.finish_step()
        assert cache == {}
        assert side._attached is None
        assert engine.board.statuses(0) == (TransferStatus.EMPTY,)
        side.close(1.0)


def test_invariant_12_a_plan_of_loads_without_a_segment_is_an_error_and_not_a_wrong_step() -> None:
    with EngineLoop() as engine:
        worker = engine.runners[0].connector
        attached, worker._worker._attached = worker._worker._attached, None
        load = Transfer(0, "absent", 0, 1, WIDTH, DTYPE)
        worker.bind_connector_metadata(StepPlan(1, "lmcache_neuron_ec_nowhere", loads=(load,)))
        with pytest.raises(RuntimeError, match="nowhere"):
            worker.start_load_caches({})
        worker.clear_connector_metadata()
        worker._worker._attached = attached


def made(config: Any) -> None:
    ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("lmcache_neuron_ec_")]


def test_invariant_12_encoder_decoder_models_are_refused() -> None:
    before, config = segments(), vllm_config()
    with (
        mock.patch.object(config.model_config, "is_encoder_decoder", True),
        pytest.raises(ValueError, match=r"is an encoder-decoder model.*Remove --ec-transfer-config"),
    ):
        made(config)
    assert segments() == before


def test_invariant_12_external_launcher_with_several_ranks_is_refused() -> None:
    config = vllm_config(EngineOptions(ranks=2))
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ValueError, match=r"external_launcher with 2 ranks.*Use mp or ray"):
        made(config)


def test_invariant_12_external_launcher_with_one_rank_is_not() -> None:
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    engine_checks.refuse_unsupported(config, mock.Mock())


def test_invariant_12_ranks_on_several_hosts_are_refused() -> None:
    config = vllm_config(EngineOptions(ranks=2))
    config.parallel_config.nnodes = 2
    assert config.parallel_config.nnodes_within_dp == 2
    with pytest.raises(ValueError, match=r"spans 2 hosts.*one data-parallel replica per host"):
        made(config)


def test_invariant_12_the_workers_half_is_built_from_vllms_groups() -> None:
    groups = {"_TP": (4, 3), "_PCP": (2, 1), "_PP": (2, 0)}
    with pytest.MonkeyPatch.context() as patch:
        for name, (size, rank) in groups.items():
            group = SimpleNamespace(world_size=size, rank_in_group=rank, is_first_rank=rank == 0)
            patch.setattr(f"vllm.distributed.parallel_state.{name}", group)
        connector = ECConnectorFactory.create_connector(vllm_config(), ECConnectorRole.WORKER)
    side = connector._worker
    assert side._options.rank == 1 * 4 + 3
    assert side._options.takes_part
    assert os.getpid() in side._options.owner_pids and os.getppid() in side._options.owner_pids
    with pytest.raises(RuntimeError, match="scheduler's hook"):
        connector.build_connector_meta(SimpleNamespace())
    connector.shutdown()
    assert not side._attacher.is_alive()


# -- 16: nothing below the pool on a step thread -----------------------------------------------------------------------


@pytest.fixture
def blocked() -> Iterator[WatchedTier]:
    """A tier whose every call blocks, look-ups of its in-memory index excepted; it says that it holds everything."""
    tier = WatchedTier()
    with tier.held("probe", "read", "write", "remove", "close"), mock.patch.object(tier, "lists", lambda name: True):
        yield tier


def test_invariant_16_no_hook_waits_for_a_tier_that_blocks(blocked: WatchedTier) -> None:
    """Every request ends while not one call to the tier has come back, and none was made on this thread."""
    engine = EngineLoop(EngineOptions(settings={"io_threads": 2, "io_queue_items": 2}), [blocked])
    clock = engine.admission._clock = Clock()

    def run() -> None:
        while engine.scheduler.has_requests():
            engine.step()
            clock.advance(0.5)

    # More than the I/O threads and their queue take: the rest is missed at once.
    for number in range(6):
        engine.add(f"unknown {number}", [Image(f"unknown {number}"), 4, Image(f"other {number}")], max_tokens=2)
    run()
    engine.ask("device hit", Image("other 5"))
    engine.add("aborted", [Image("never seen")])
    engine.step()
    engine.abort("aborted")
    engine.add("filler", [Image("filler", rows=64)])
    run()
    engine.update_weights()
    engine.add("after the reset", [Image("unknown 1")])
    run()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}
    assert engine.ended.keys() >= {f"unknown {number}" for number in range(6)} | {"device hit", "after the reset"}
    assert engine.admission.counts["staging_deadline_missed"] > 0
    assert engine.hierarchy.counts()["miss_io_queue_full"] > 0
    wait_until(lambda: bool(blocked.threads), "it is called")  # by a thread that may not have had its turn yet
    assert {thread for _, thread in blocked.threads} <= {"ec-io-0", "ec-io-1"}
    blocked.recover()
    engine.close()


def test_invariant_16_nor_do_workers_and_their_threads_call_a_tier(blocked: WatchedTier) -> None:
    engine = EngineLoop(EngineOptions(ranks=2), [blocked])
    clock = engine.admission._clock = Clock()
    engine.add("one", [CAT, DOG])
    engine.step()
    clock.advance(100.0)
    engine.run()
    wait_until(lambda: not engine.ledger.num_outstanding, "the copies have ended")
    assert {thread.rstrip("0123456789") for _, thread in blocked.threads} <= {"ec-io-"}
    blocked.recover()
    engine.close()


def test_invariant_16_decode_steps_ask_no_tier(stored: WatchedTier) -> None:
    """Field report 22."""
    with EngineLoop(EngineOptions(), [stored]) as engine:
        engine.add("long answer", [CAT, DOG], max_tokens=50)
        engine.run(until=lambda: len(engine.runners[0].gathered) == 2)
        engine.settle()
        calls = len(stored.threads)
        engine.run()
        assert len(stored.threads) == calls
