# SPDX-License-Identifier: Apache-2.0
"""Images and videos in any order and under any pressure, on the plugin's contract.

Every gathered block is right, nothing dies, nothing is skipped in silence, nothing is encoded while a tier holds it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.neuron.engine import NeuronLoop, NeuronOptions
from tests.neuron.items import video
from tests.scheduler.items import Image
from tests.scheduler.test_random_workloads import KINDS, LIMITS, Action, Driver, Workload

MAX_ROWS = 24
BLOCK = 8
ITEMS = [
    Image("dot", 1),
    Image("stamp", 5, row_tokens=2),
    Image("picture", BLOCK),
    Image("large picture", 13),
    video("clip", 4, 3),
    video("odd clip", 4, 5),
    video("long clip", 8, 3),
    video("coarse clip", 3, BLOCK),
]
"""Whole frames of 5 fill blocks of 8 with 5: more blocks than the dense count."""


@st.composite
def requests(draw: st.DrawFn) -> Action:
    items = draw(st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3))
    place = draw(st.integers(0, len(items)))
    prompt = [*items[:place], draw(st.integers(1, MAX_ROWS)), *items[place:]]
    return "add", prompt, draw(st.sampled_from([1, 2, 5, 24])), draw(st.integers(0, 3))


def actions() -> st.SearchStrategy[list[Action]]:
    of_kind = {"add": requests(), "step": st.tuples(st.just("step"), st.integers(1, 6))}
    kinds = st.sampled_from(KINDS).flatmap(lambda kind: of_kind.get(kind, st.just((kind,))))
    return st.lists(kinds, min_size=30, max_size=60)


@st.composite
def workloads(draw: st.DrawFn, ranks: int, hook: bool) -> Workload:
    options = NeuronOptions(
        # The dense count of the largest item is 24: its blocks are 4 by whole frames, and 33 rows make 5.
        device_rows=draw(st.sampled_from([33, 48] if hook else [MAX_ROWS])),
        # Without the flags blocks are not counted, and only more of them than the budget admits keep the engine alive.
        num_blocks=None if hook else 64,
        pool_pages=draw(st.sampled_from([4, 256])),
        batch_tokens=draw(st.sampled_from([16, 32, 64])),
        kv_blocks=draw(st.sampled_from([160, 3200])) // 4 + 1,
        block_size=4,
        ranks=ranks,
        async_scheduling=draw(st.booleans()),
        ahead=draw(st.sampled_from([0, 0, 1, 2])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        block_tokens=BLOCK,
        hook=hook,
        counts_blocks=hook,
        min_hold_time_ms=draw(st.sampled_from([0.0, 5.0])) if hook else 0.0,
        refuse_eager_writes=draw(st.booleans()),
        copies_metadata=draw(st.booleans()),
        settings={
            "staging_deadline_seconds": 60.0,
            "spill_policy": draw(st.sampled_from(["write_behind", "on_evict"])),
            "max_dirty_seconds": 0.3,
        },
    )
    happens = [*(("add", [item], 1, 0) for item in ITEMS), *draw(actions())]
    if not hook:  # 0.24 tells nobody of a reset then, which the log says at start: new weights take a new process
        happens = [action for action in happens if action != ("update",)]
    return Workload(options, draw(st.booleans()), happens)


def play(workload: Workload) -> None:
    driver = Driver(workload, make=NeuronLoop, images=ITEMS)
    driver.play()
    if workload.options.pool_pages < 256:
        return
    for item in ITEMS:
        name = item.identifier
        assert driver.encoded[name] <= 1 + driver.excused[name], f"{item} was encoded {driver.encoded[name]} times"


@pytest.mark.parametrize(("ranks", "examples"), [(1, 15), (2, 10), (16, 3)])
def test_with_our_classes(ranks: int, examples: int) -> None:
    settings(LIMITS, max_examples=examples)(given(workloads(ranks, hook=True))(play))()


@pytest.mark.parametrize(("ranks", "examples"), [(1, 8), (2, 4)])
def test_by_the_transfer_config_alone(ranks: int, examples: int) -> None:
    settings(LIMITS, max_examples=examples)(given(workloads(ranks, hook=False))(play))()


def test_the_pressure_is_real() -> None:
    """The same kind of engine, with vLLM's own way of counting, dies of one of these items' blocks."""
    options = NeuronOptions(device_rows=MAX_ROWS, block_tokens=BLOCK, counts_blocks=False)
    with pytest.raises(RuntimeError, match="Encoder cache full"):
        engine = NeuronLoop(options)
        try:
            engine.ask("1", replace(ITEMS[5]))
        finally:
            engine.close()
