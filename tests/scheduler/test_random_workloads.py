# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, in whatever order, under whatever pressure: right rows, no death, nothing leaked, nothing in vain.

The runner stand-in compares every row that reaches the language model, and dies where vLLM's would. Each engine asserts
at its end that no byte, lease or slot is left over.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm.v1.engine import FinishReason

from storage_tiers.entry import EntryState
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import Image, wanted
from tests.scheduler.lower_tiers import WatchedTier

MAX_ROWS = 24
IMAGES = [
    Image(f"picture {number}", rows, row_tokens=5 if number % 3 == 0 else 0)
    for number, rows in enumerate((1, 4, 7, 8, 12, 16, 20, MAX_ROWS))
]
LARGE_POOL = 256

Part = int | Image
Action = tuple


@dataclass(frozen=True)
class Workload:
    """What happens to one engine, or to several after each other over one tier."""

    options: EngineOptions
    has_tier: bool
    actions: Sequence[Action]


KINDS = (
    ["add"] * 50 + ["step"] * 22 + ["run"] * 14 + ["abort"] * 5 + ["settle"] * 5 + ["reset", "update"] + ["restart"] * 2
)
"""How often each action comes, of a hundred."""


@st.composite
def requests(draw: st.DrawFn, pixels: bool) -> Action:
    """A request for up to three images and some text, for one token or for many, of some priority."""
    images = draw(st.lists(st.sampled_from(IMAGES), min_size=1, max_size=3))
    if not pixels:
        images = [replace(image, has_pixels=draw(st.booleans())) for image in images]
    place = draw(st.integers(0, len(images)))
    prompt = [*images[:place], draw(st.integers(1, MAX_ROWS)), *images[place:]]
    return "add", prompt, draw(st.sampled_from([1, 2, 5, 24])), draw(st.integers(0, 3))


def actions(pixels: bool) -> st.SearchStrategy[list[Action]]:
    of_kind = {
        "add": requests(pixels),
        "step": st.tuples(st.just("step"), st.integers(1, 6)),
    }
    kinds = st.sampled_from(KINDS).flatmap(lambda kind: of_kind.get(kind, st.just((kind,))))
    return st.lists(kinds, min_size=40, max_size=80)


@st.composite
def workloads(draw: st.DrawFn, pool_pages: st.SearchStrategy[int], pixels: bool) -> Workload:
    block_size = draw(st.sampled_from([4, 16]))
    options = EngineOptions(
        device_rows=draw(st.sampled_from([MAX_ROWS, 32, 48])),
        pool_pages=draw(pool_pages),
        batch_tokens=draw(st.sampled_from([16, 32, 64])),
        kv_blocks=draw(st.sampled_from([128, 144, 176, 3200])) // block_size + 1,
        block_size=block_size,
        ranks=draw(st.sampled_from([1, 1, 2])),
        async_scheduling=draw(st.booleans()),
        ahead=draw(st.sampled_from([0, 0, 1, 2])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        scheduler={
            "scheduler_reserve_full_isl": draw(st.booleans()),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 8, 16])),
        },
        settings={"staging_deadline_seconds": 60.0, "io_threads": draw(st.sampled_from([1, 3]))},
    )
    first = [] if pixels else [("add", [image], 1, 0) for image in IMAGES]
    return Workload(options, draw(st.sampled_from([True, True, False])), [*first, *draw(actions(pixels))])


@dataclass
class Driver:
    """Plays a workload and watches what is answered."""

    workload: Workload
    tier: WatchedTier = field(default_factory=WatchedTier)
    encoded: Counter[str] = field(default_factory=Counter)
    """Encoder runs by identifier, of all engines."""
    excused: Counter[str] = field(default_factory=Counter)
    """Events by identifier after which another encoder run is right: a save is under way, or what was stored void."""
    make: Callable[..., EngineLoop] = EngineLoop
    images: Sequence[Image] = tuple(IMAGES)
    was_reset: bool = False
    """Whether what this engine has stored will be void in the next process."""

    def play(self) -> None:
        waiting = list(self.workload.actions)
        while True:
            with self.make(self.workload.options, [self.tier] if self.workload.has_tier else []) as engine:
                self._watch(engine)
                while waiting and waiting[0] != ("restart",):
                    self._act(engine, waiting.pop(0))
                engine.run()
                self._check_ends(engine)
            self.encoded += engine.encoded
            if not waiting:
                return
            waiting.pop(0)
            if not self.workload.has_tier or self.was_reset:
                self.excused.update(image.identifier for image in self.images)
            self.was_reset = False

    def _act(self, engine: EngineLoop, action: Action) -> None:
        match action:
            case "add", request_parts, max_tokens, priority:
                self._add(engine, request_parts, max_tokens, priority)
            case "step", count:
                for _ in range(count):
                    if engine.scheduler.has_requests():
                        engine.step()
            case ("abort",):
                for request_id in list(engine.scheduler.requests)[:1]:
                    engine.abort(request_id)
            case ("settle",):
                engine.catch_up()
                engine.settle()
            case ("run",):
                engine.run()
            case ("reset",):
                engine.reset_encoder_cache()
                self._void()
            case ("update",):
                engine.update_weights()
                self._void()

    def _void(self) -> None:
        self.was_reset = True
        self.excused.update(image.identifier for image in self.images)

    def _add(self, engine: EngineLoop, request_parts: list[Part], max_tokens: int, priority: int) -> None:
        if engine.options.policy == "priority":
            # A preemption takes back an encoder run that another request of the same pass relies on: vLLM's own death.
            used = {image.identifier for name in engine.scheduler.requests for image in engine.told.images[name]}
            request_parts = [p for p in request_parts if isinstance(p, int) or p.identifier not in used]
        if request_parts:
            name = f"request {len(engine.told.images)}"
            engine.add(name, request_parts, max_tokens=max_tokens, priority=priority)

    def _watch(self, engine: EngineLoop) -> None:
        """Have every no for a resident item be an error, and every other no that finds a trace of the item noted."""
        ask = engine.connector.has_cache_item

        def asked(identifier: str) -> bool:
            image = next(image for image in self.images if image.identifier == identifier)
            want = wanted(image, engine.fingerprint)
            first = want not in engine.side._answers
            before = engine.hierarchy.state_of(want)
            answer = ask(identifier)
            if not answer and first:
                assert before is not EntryState.RESIDENT, f"{image} is in the pool and will be encoded"
                self.excused[identifier] += before is not None
            return answer

        engine.connector.has_cache_item = asked  # type: ignore[method-assign]

    def _check_ends(self, engine: EngineLoop) -> None:
        for name, reason in engine.ended.items():
            blind = any(not image.has_pixels for image in engine.told.images[name])
            assert reason is FinishReason.LENGTH or (blind and reason is FinishReason.ERROR), (name, reason)
        assert engine.faults() == {} or set(engine.faults()) == {("pool", "exhausted")}


LIMITS = settings(
    max_examples=20,
    deadline=None,
    # Without shrinking, which plays thousands of workloads: what fails is printed whole, and is small enough to read.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@LIMITS
@given(workloads(pool_pages=st.just(LARGE_POOL), pixels=True))
def test_with_room_in_the_pool_no_item_is_encoded_twice(workload: Workload) -> None:
    driver = Driver(workload)
    driver.play()
    for image in IMAGES:
        name = image.identifier
        assert driver.encoded[name] <= 1 + driver.excused[name], f"{image} was encoded {driver.encoded[name]} times"


@LIMITS
@given(workloads(pool_pages=st.sampled_from([1, 2, 4, 6]), pixels=True))
def test_with_a_pool_for_a_few_items_every_request_gets_the_right_rows(workload: Workload) -> None:
    Driver(workload).play()


@LIMITS
@given(workloads(pool_pages=st.sampled_from([2, 6, LARGE_POOL]), pixels=False))
def test_with_items_that_cannot_be_encoded_the_engine_lives(workload: Workload) -> None:
    Driver(workload).play()


@LIMITS
@given(workloads(pool_pages=st.sampled_from([4, LARGE_POOL]), pixels=True))
def test_with_encodes_and_loads_taken_back_by_preemptions_the_engine_lives(workload: Workload) -> None:
    pressed = replace(
        workload.options,
        policy="priority",
        block_size=4,
        kv_blocks=33,
        scheduler={"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 8},
    )
    Driver(replace(workload, options=pressed)).play()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_restart_everything_stored_is_served(asynchronous: bool) -> None:
    tier = WatchedTier()
    options = EngineOptions(async_scheduling=asynchronous, device_rows=32)
    with EngineLoop(options, [tier]) as engine:
        for number in range(40):
            chosen = [IMAGES[(number * step) % len(IMAGES)] for step in (1, 3, 5)]
            engine.add(f"request {number}", [2, *chosen, 3], max_tokens=2)
        engine.run()
    assert tier.names() == {image.identifier for image in IMAGES}
    with EngineLoop(options, [tier]) as engine:
        for number in range(40):
            engine.add(f"request {number}", [IMAGES[number % len(IMAGES)], IMAGES[(number * 3) % len(IMAGES)]])
        engine.run()
        assert not engine.encoded
