# SPDX-License-Identifier: Apache-2.0
"""Invariant 15: the scheduler counts the blocks that the device counts, so that nothing it admits finds no room.

The device here is the runner stand-in's dictionary, counted in blocks after every step, when it holds most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

import connector
from connector import block_geometry
from connector.block_aware_manager import BlockAwareEncoderCacheManager
from connector.block_geometry import BlockGeometry, geometry_for, geometry_of
from connector.cache_manager import DeviceResidency, ReportingEncoderCacheManager, install_reporting_manager
from connector.settings import BehaviourSettings, SettingsError, load_settings
from tests.scheduler.engine_loop import EngineLoop, EngineOptions, vllm_config
from tests.scheduler.items import Image, make_request
from tests.scheduler.lower_tiers import WatchedTier
from tests.scheduler.test_random_workloads import LIMITS, MAX_ROWS, Driver, Workload, workloads
from tests.scheduler.versions import needs_named_managers

OURS = "connector.BlockAwareEncoderCacheManager"
STOCK = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
FIELD = BlockGeometry(block_size=4, num_blocks=8)
"""The field's padding case: seven blocks that hold items."""
LARGE_BUDGET = 10_000
LARGEST_ITEM = block_geometry._largest_item_tokens


def options_for(geometry: BlockGeometry, rows: int, **more: Any) -> EngineOptions:
    """An engine with a budget of `rows` embeddings over blocks of `geometry`."""
    sizes = {"device_block_size": geometry.block_size, "device_num_blocks": geometry.num_blocks}
    return EngineOptions(device_rows=rows, manager=OURS, settings={**sizes, **more.pop("settings", {})}, **more)


@pytest.fixture(autouse=True)
def largest_item() -> Iterator[mock.Mock]:
    """Nobody knows the largest item: vLLM would ask the model's processor, and this model has none."""
    with mock.patch.object(block_geometry, "_largest_item_tokens", return_value=None) as largest:
        yield largest


def assert_accounts(manager: BlockAwareEncoderCacheManager) -> None:
    """What is held, what can be evicted and what is free add up to the capacity, in blocks."""
    blocks = {
        mm_hash: needed if (needed := manager.geometry.blocks_for(size)) <= manager.geometry.capacity_blocks else 0
        for mm_hash, size in manager.num_embeds_by_hash.items()
    }
    unused = {mm_hash for mm_hash, references in manager.cached.items() if not references}
    assert manager.cached.keys() == blocks.keys()
    assert dict(manager.freeable) == {mm_hash: blocks[mm_hash] for mm_hash in unused}
    assert 0 <= manager.num_free_slots <= manager.num_freeable_slots <= manager.cache_size
    assert manager.num_free_slots + sum(blocks.values()) == manager.cache_size == manager.geometry.capacity_blocks
    assert manager.num_free_slots + sum(manager.freeable.values()) == manager.num_freeable_slots
    oversize = [
        mm_hash
        for mm_hash, size in manager.num_embeds_by_hash.items()
        if manager.geometry.blocks_for(size) > manager.geometry.capacity_blocks
    ]
    assert len(oversize) <= 1 and not unused & set(oversize)


class BlockDevice:
    """Counts what an engine's device holds, in blocks, after each step of each rank."""

    def __init__(self, engine: EngineLoop, geometry: BlockGeometry) -> None:
        self.geometry = geometry
        self.most_blocks = 0
        """Blocks in use at the worst moment, without items that no empty cache has room for."""
        self.most_oversize = 0
        manager = engine.scheduler.encoder_cache_manager
        schedule = engine.scheduler.schedule

        def scheduled(*arguments: Any) -> Any:
            output = schedule(*arguments)
            if isinstance(manager, BlockAwareEncoderCacheManager):
                assert_accounts(manager)
            return output

        engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
        for runner in engine.runners:
            self._count_after_steps(runner)

    def _count_after_steps(self, runner: Any) -> None:
        execute = runner.execute

        def executed(output: Any) -> Any:
            result = execute(output)
            items = [self.geometry.blocks_for(len(rows)) for rows in runner.encoder_cache.values()]
            fitting = [blocks for blocks in items if blocks <= self.geometry.capacity_blocks]
            self.most_blocks = max(self.most_blocks, sum(fitting))
            self.most_oversize = max(self.most_oversize, len(items) - len(fitting))
            return result

        runner.execute = executed


# -- The padding case of the field -------------------------------------------------------------------------------------


def ask_for_twenty_and_the_first_again(options: EngineOptions) -> BlockDevice:
    """Twenty distinct items of five tokens, all at once, then the first again; each may be encoded once."""
    images = [Image(f"item {number}", rows=5) for number in range(20)]
    with EngineLoop(options, [WatchedTier()]) as engine:
        device = BlockDevice(engine, FIELD)
        for number, image in enumerate(images):
            engine.add(f"request {number}", [image])
        engine.run()
        engine.settle()
        encoded = engine.encoder_runs(*images)
        engine.ask("the first again", images[0])
        assert encoded == engine.encoder_runs(*images) == len(images)
        assert set(engine.ended.values()) == {FinishReason.LENGTH}
        assert engine.faults() == {}
    return device


@pytest.mark.parametrize("asynchronous", [False, True])
def test_invariant_15_the_padding_case_of_the_field_never_exceeds_the_blocks(asynchronous: bool) -> None:
    device = ask_for_twenty_and_the_first_again(options_for(FIELD, rows=50, async_scheduling=asynchronous))
    assert device.most_blocks == 6, "three items of two blocks fit into seven"


def test_invariant_15_the_stock_manager_exceeds_the_blocks_in_the_padding_case() -> None:
    device = ask_for_twenty_and_the_first_again(replace(options_for(FIELD, rows=50), manager=STOCK))
    assert device.most_blocks > FIELD.capacity_blocks


@pytest.mark.parametrize(("manager", "at_once"), [(OURS, 8), (STOCK, 10)])
def test_invariant_15_videos_are_admitted_eight_at_a_time(manager: str, at_once: int) -> None:
    """1,568 tokens are 3.06 blocks of 512: a budget of 16,384 tokens has room for ten, its 32 blocks for eight."""
    geometry = geometry_for(block_size=512, num_blocks=None, encoder_cache_size=16_384, max_item_tokens=1568)
    assert geometry == BlockGeometry(512, 33)
    options = EngineOptions(
        device_rows=16_384,
        batch_tokens=16_384,
        pool_pages=3000,
        kv_blocks=3000,
        manager=manager,
        settings={"device_block_size": 512},
    )
    with EngineLoop(options) as engine:
        device = BlockDevice(engine, geometry)
        for number in range(20):
            engine.add(f"request {number}", [Image(f"video {number}", rows=1568, modality="video")])
        assert len(engine.step().scheduled_encoder_inputs) == at_once
        engine.run()
        assert sum(engine.encoded.values()) == 20
    assert device.most_blocks == at_once * 4


# -- Random workloads --------------------------------------------------------------------------------------------------


class BlockDriver(Driver):
    """Holds every engine of a workload to its blocks."""

    def _watch(self, engine: EngineLoop) -> None:
        super()._watch(engine)
        manager = engine.scheduler.encoder_cache_manager
        assert isinstance(manager, BlockAwareEncoderCacheManager)
        self.devices = [*getattr(self, "devices", []), BlockDevice(engine, manager.geometry)]

    def play(self) -> None:
        super().play()
        for device in self.devices:
            assert device.most_blocks <= device.geometry.capacity_blocks
            assert device.most_oversize <= 1


@st.composite
def block_workloads(draw: st.DrawFn, largest: int) -> Workload:
    """Workloads over few blocks, at least enough for one item of `largest` tokens."""
    workload = draw(workloads(pool_pages=st.sampled_from([4, 256]), pixels=True))
    block_size = draw(st.sampled_from([1, 3, 4, 5, 8, 32]))
    num_blocks = BlockGeometry(block_size, 0).blocks_for(largest) + 1 + draw(st.integers(0, 4))
    sizes = {"device_block_size": block_size, "device_num_blocks": num_blocks}
    options = replace(workload.options, manager=OURS, settings={**workload.options.settings, **sizes})
    return replace(workload, options=options)


@LIMITS
@given(block_workloads(largest=MAX_ROWS))
def test_invariant_15_under_any_workload_the_blocks_suffice_and_every_request_ends(workload: Workload) -> None:
    BlockDriver(workload).play()


@LIMITS
@given(block_workloads(largest=1))
def test_invariant_15_under_any_workload_items_that_no_empty_cache_holds_end_too(workload: Workload) -> None:
    BlockDriver(workload).play()


@LIMITS
@given(block_workloads(largest=MAX_ROWS))
def test_invariant_15_under_preemptions_the_blocks_suffice(workload: Workload) -> None:
    pressed = replace(
        workload.options,
        policy="priority",
        block_size=4,
        kv_blocks=33,
        scheduler={"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 8},
    )
    BlockDriver(replace(workload, options=pressed)).play()


# -- The manager alone, asked as vLLM asks -----------------------------------------------------------------------------


@dataclass
class Pass:
    """One try of vLLM's to schedule a request: which of its items it drops though they were admitted, and the end."""

    sizes: list[int]
    passed_over: set[int]
    is_scheduled: bool
    ends: bool


PASSES = st.builds(
    Pass,
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    passed_over=st.sets(st.integers(0, 4), max_size=2),
    is_scheduled=st.booleans(),
    ends=st.booleans(),
)


def request_for(name: str, *images: Image) -> Request:
    return make_request(name, images)


def try_request(
    manager: BlockAwareEncoderCacheManager, request: Request, passed_over: set[int] = frozenset(), allocate: bool = True
) -> list[int]:
    """Ask for the request's items in order, as the scheduler does; those that it then allocates."""
    chosen: list[int] = []
    num_embeds = 0
    for index in range(len(request.mm_features)):
        if manager.check_and_update_cache(request, index):
            continue
        if not manager.can_allocate(request, index, LARGE_BUDGET, num_embeds):
            break
        if index not in passed_over:
            chosen.append(index)
            num_embeds += request.get_num_encoder_embeds(index)
    for index in chosen if allocate else ():
        manager.allocate(request, index)
    return chosen


@settings(deadline=None, max_examples=150)
@given(st.lists(PASSES, max_size=25), st.integers(1, 6), st.integers(2, 9))
def test_invariant_15_what_was_admitted_can_be_allocated(passes: list[Pass], block_size: int, num_blocks: int) -> None:
    manager = BlockAwareEncoderCacheManager(BlockGeometry(block_size, num_blocks))
    running: list[Request] = []
    on_device: set[str] = set()
    for number, each in enumerate(passes):
        images = [Image(f"picture {size} {place % 2}", size) for place, size in enumerate(each.sizes)]
        request = request_for(str(number), *{image.identifier: image for image in images}.values())
        chosen = try_request(manager, request, each.passed_over, each.is_scheduled)
        assert_accounts(manager)
        if each.is_scheduled:
            running.append(request)
        else:
            manager.free(request)  # as vLLM does for a request that finds no room for its KV
        on_device -= set(manager.get_freed_mm_hashes())
        on_device |= {request.mm_features[index].identifier for index in chosen if each.is_scheduled}
        assert on_device >= manager.cached.keys(), "nothing was freed that is listed"
        if each.ends and running:
            manager.free(running.pop(0))
            assert_accounts(manager)
    for request in running:
        manager.free(request)
    assert manager.num_freeable_slots == manager.cache_size


def test_invariant_15_a_pass_is_counted_in_blocks_of_each_item() -> None:
    """Fifteen tokens in one sum would be four blocks; as three items of five they are six."""
    manager = BlockAwareEncoderCacheManager(BlockGeometry(block_size=4, num_blocks=6))
    assert try_request(manager, request_for("three", *(Image(str(n), 5) for n in range(3)))) == [0, 1]
    assert manager.num_free_slots == 1


def test_invariant_15_an_item_that_was_passed_over_takes_no_room() -> None:
    manager = BlockAwareEncoderCacheManager(BlockGeometry(block_size=4, num_blocks=6))
    request = request_for("four", *(Image(str(n), 5) for n in range(4)))
    assert try_request(manager, request, passed_over={0, 2}) == [1, 3]


def test_invariant_15_what_was_admitted_for_a_request_without_kv_blocks_takes_no_room() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    images = [Image(str(n), 5) for n in range(6)]
    assert try_request(manager, request_for("no blocks", *images[:3]), allocate=False) == [0, 1, 2]
    assert try_request(manager, request_for("runs", *images[3:])) == [0, 1, 2]


def test_invariant_15_a_sum_that_cannot_be_is_refused_until_the_next_request() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    request = request_for("one", Image("a", 5), Image("b", 5))
    assert manager.can_allocate(request, 0, LARGE_BUDGET, 0)
    assert not manager.can_allocate(request, 1, LARGE_BUDGET, 4)
    assert manager.can_allocate(request, 1, LARGE_BUDGET, 0)


def test_invariant_15_the_compute_budget_stays_in_embeddings() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    request = request_for("one", Image("a", 5))
    assert not manager.can_allocate(request, 0, 4, 0)
    assert manager.can_allocate(request, 0, 5, 0)
    manager.allocate(request, 0)
    assert manager.num_embeds_by_hash == {Image("a", 5).identifier: 5}
    if hasattr(EncoderCacheManager, "get_cached_num_encoder_embeds"):  # 0.24 does not ask for it
        assert manager.get_cached_num_encoder_embeds(request, 0) == 5
    assert manager.num_free_slots == 5


def test_an_item_that_was_not_admitted_cannot_be_allocated() -> None:
    manager = BlockAwareEncoderCacheManager(BlockGeometry(4, 2))
    request = request_for("two", Image("a", 4), Image("b", 4))
    manager.allocate(request, 0)
    with pytest.raises(RuntimeError, match="takes 1 blocks, and 0 are free"):
        manager.allocate(request, 1)


def test_evicted_and_allocated_again_in_one_step_an_item_keeps_its_tensor() -> None:
    manager = BlockAwareEncoderCacheManager(BlockGeometry(block_size=4, num_blocks=3))
    first, other = request_for("first", Image("a", 5)), request_for("other", Image("b", 5))
    try_request(manager, first)
    manager.free(first)
    assert try_request(manager, other, allocate=False) == [0], "evicts the first, and finds no KV blocks"
    assert try_request(manager, first) == [0]
    assert manager.get_freed_mm_hashes() == []
    manager.free(first)
    try_request(manager, other)
    assert manager.get_freed_mm_hashes() == [Image("a", 5).identifier]


def test_the_item_that_was_unused_longest_is_evicted_first() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    requests = [request_for(str(n), Image(str(n), 5)) for n in range(3)]
    for request in requests:
        try_request(manager, request)
    for request in (requests[1], requests[0], requests[2]):
        manager.free(request)
    try_request(manager, request_for("next", Image("next", 8)))
    assert manager.get_freed_mm_hashes() == [Image("1", 5).identifier]


def test_forgetting_gives_back_blocks() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    request, image = request_for("one", Image("a", 5)), Image("a", 5)
    try_request(manager, request)
    manager.free(request)
    manager.forget(image.identifier)
    assert_accounts(manager)
    assert manager.num_free_slots == 7
    manager.forget("never seen")
    assert manager.num_free_slots == 7


def test_what_is_forgotten_leaves_the_device_if_it_was_there_from_before() -> None:
    """Evicted, allocated again and taken back in one pass: the workers were never told, and would keep its blocks."""
    manager = BlockAwareEncoderCacheManager(BlockGeometry(block_size=4, num_blocks=3))
    first, other = request_for("first", Image("a", 5)), request_for("other", Image("b", 5))
    try_request(manager, first)
    manager.free(first)
    try_request(manager, other, allocate=False)
    try_request(manager, first)
    manager.free(first)
    assert manager.get_freed_mm_hashes() == []
    manager.forget(Image("a", 5).identifier)
    assert manager.get_freed_mm_hashes() == [Image("a", 5).identifier]


def test_invariant_10_a_reset_restores_every_block_and_is_reported() -> None:
    with EngineLoop(options_for(FIELD, rows=28)) as engine:
        manager = engine.scheduler.encoder_cache_manager
        engine.ask("one", Image("a", 5))
        before = engine.fingerprint
        engine.reset_encoder_cache()
        assert manager.num_free_slots == manager.num_freeable_slots == 7
        assert not manager.cached
        assert engine.fingerprint != before


# -- One item at a time, and items without room ------------------------------------------------------------------------


def test_room_for_exactly_one_item_makes_progress() -> None:
    geometry = BlockGeometry(block_size=4, num_blocks=3)
    images = [Image(str(n), 8) for n in range(5)]
    with EngineLoop(options_for(geometry, rows=8, batch_tokens=16)) as engine:
        device = BlockDevice(engine, geometry)
        engine.add("all of them", images)
        engine.add("backwards", images[::-1])
        engine.run()
        assert set(engine.ended.values()) == {FinishReason.LENGTH}
        assert engine.scheduler.encoder_cache_manager.oversize_items == 0
    assert device.most_blocks == 2


def test_an_item_larger_than_the_cache_is_used_not_cached_and_counted() -> None:
    large, larger, small = Image("large", 40), Image("larger", 44), Image("small", 8)
    with EngineLoop(options_for(FIELD, rows=50)) as engine:
        device = BlockDevice(engine, FIELD)
        manager = engine.scheduler.encoder_cache_manager
        engine.ask("before", small)
        for name in ("one", "two"):
            engine.ask(name, large, larger, small, 30)
            engine.settle()
        assert manager.oversize_items == 4
        assert manager.cached.keys() == {small.identifier}, "nothing was evicted for them"
        assert engine.encoder_runs(large) == engine.encoder_runs(larger) == 1, "the tiers below have them"
        assert engine.encoder_runs(small) == 1
        engine.ask("after", small, 1)
        assert engine.runners[0].encoder_cache.keys() == {small.identifier}
    assert device.most_oversize == 1
    assert device.most_blocks == 2


def test_requests_with_items_larger_than_the_cache_take_turns() -> None:
    images = [Image(f"large {number}", 30 + number) for number in range(4)]
    with EngineLoop(options_for(FIELD, rows=50, batch_tokens=40, async_scheduling=True)) as engine:
        device = BlockDevice(engine, FIELD)
        for number in range(6):
            engine.add(str(number), [images[number % 4], Image("small", 8), images[(number * 3 + 1) % 4]])
        engine.run()
        assert set(engine.ended.values()) == {FinishReason.LENGTH}
    assert device.most_oversize == 1


def test_two_requests_share_one_oversize_item() -> None:
    manager = BlockAwareEncoderCacheManager(FIELD)
    one, two, other = (request_for(name, Image(item, 40)) for name, item in (("1", "a"), ("2", "a"), ("3", "b")))
    assert try_request(manager, one) == [0]
    assert try_request(manager, two) == [], "it is there"
    assert try_request(manager, other) == []
    assert Image("b", 40).identifier not in manager.cached
    manager.free(one)
    assert manager.cached.keys() == {Image("a", 40).identifier}
    manager.free(two)
    assert manager.get_freed_mm_hashes() == [Image("a", 40).identifier]
    assert try_request(manager, other) == [0]
    assert manager.oversize_items == 2


# -- The geometry ------------------------------------------------------------------------------------------------------


def test_blocks_are_sized_for_the_budget_and_one_is_scratch() -> None:
    geometry = geometry_for(block_size=4, num_blocks=None, encoder_cache_size=50, max_item_tokens=None)
    assert geometry == BlockGeometry(4, 14)
    assert geometry.capacity_blocks == 13
    assert [geometry.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_an_engine_without_multimodal_inputs_needs_no_block() -> None:
    assert geometry_for(block_size=4, num_blocks=None, encoder_cache_size=0, max_item_tokens=None).capacity_blocks == 0


def refusal(**given: Any) -> str:
    arguments = {"block_size": 4, "num_blocks": None, "encoder_cache_size": 50, "max_item_tokens": None}
    with pytest.raises(SettingsError) as raised:
        geometry_for(**{**arguments, **given})
    return str(raised.value)


def test_a_geometry_that_cannot_do_is_refused_with_the_smallest_that_would() -> None:
    text = refusal(num_blocks=8, max_item_tokens=29)
    assert "device_num_blocks = 8 cannot be used: the largest item has 29 tokens" in text
    assert "device_block_size = 4" in text
    assert "allowed is 9 or more" in text
    assert geometry_for(block_size=4, num_blocks=9, encoder_cache_size=50, max_item_tokens=29).capacity_blocks == 8
    assert "14 (from an encoder cache size of 50 tokens)" in refusal(max_item_tokens=53)
    assert "device_block_size = 0" in refusal(block_size=0)
    assert "allowed is 2 or more" in refusal(num_blocks=1)


@pytest.mark.parametrize("value", [0, True, "4", 1.5])
def test_a_setting_of_the_wrong_kind_is_refused_by_name(value: object) -> None:
    with pytest.raises(SettingsError, match=r"device_num_blocks = .* allowed is an integer and at least 2"):
        load_settings({"device_num_blocks": value}, {})
    if value != "4":
        with pytest.raises(SettingsError, match=r"device_block_size = .* allowed is an integer and at least 1"):
            load_settings({"device_block_size": value}, {})


def test_the_largest_item_is_asked_for_only_where_the_blocks_are_fewer_than_the_budget(largest_item: mock.Mock) -> None:
    config = SimpleNamespace(additional_config={})
    largest_item.return_value = 29
    assert geometry_of(config, BehaviourSettings(device_block_size=4), 50) == BlockGeometry(4, 14)
    assert geometry_of(config, BehaviourSettings(device_block_size=4, device_num_blocks=14), 50).num_blocks == 14
    largest_item.assert_not_called()
    with pytest.raises(SettingsError, match="allowed is 9 or more"):
        geometry_of(config, BehaviourSettings(device_block_size=4, device_num_blocks=8), 50)


def test_a_budget_that_an_item_has_raised_is_that_item() -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(encoder_cache_size=40))
    assert LARGEST_ITEM(config, 50) == 50


@pytest.mark.parametrize("nested", [False, True])
def test_the_block_size_must_be_what_the_encoders_attention_block_gives(nested: bool) -> None:
    config = vllm_config()
    key = {"vision_attention_block_size": 2048}
    config.additional_config = {"vision_neuron_config": key} if nested else key
    assert geometry_of(config, BehaviourSettings(device_block_size=512), 16_384) == BlockGeometry(512, 33)
    assert geometry_of(config, BehaviourSettings(), 16_384) == BlockGeometry(512, 33), "it follows where none is set"
    with pytest.raises(SettingsError) as raised:
        geometry_of(config, BehaviourSettings(device_block_size=256), 16_384)
    assert "device_block_size = 256 does not fit vision_attention_block_size = 2048" in str(raised.value)
    assert "set device_block_size to 512" in str(raised.value)


def test_the_block_count_is_the_one_that_the_plugin_makes() -> None:
    """vllm-neuron makes as many blocks as its option says, and no fewer than the budget takes."""
    config = vllm_config()
    config.additional_config = {"vision_attention_block_size": 2048, "encoder_cache_num_blocks": 64}
    assert geometry_of(config, BehaviourSettings(), 16_384) == BlockGeometry(512, 64)
    config.additional_config["encoder_cache_num_blocks"] = 8
    assert geometry_of(config, BehaviourSettings(device_num_blocks=33), 16_384) == BlockGeometry(512, 33)
    with pytest.raises(SettingsError, match=r"device_num_blocks = 8 is not what vllm-neuron makes .* which is 33"):
        geometry_of(config, BehaviourSettings(device_num_blocks=8), 16_384)


# -- How vLLM makes it -------------------------------------------------------------------------------------------------


def test_vllm_makes_it_by_the_name_that_users_give() -> None:
    with EngineLoop(options_for(FIELD, rows=28)) as engine:
        manager = engine.scheduler.encoder_cache_manager
        assert type(manager) is BlockAwareEncoderCacheManager is connector.BlockAwareEncoderCacheManager
        assert manager.geometry == FIELD
        assert engine.residency.has_manager
        engine.ask("one", Image("a", 5))
        assert Image("a", 5).identifier in engine.residency


def test_without_the_connector_it_counts_in_blocks_all_the_same() -> None:
    config = vllm_config()
    config.ec_transfer_config = None
    manager = BlockAwareEncoderCacheManager.create_manager(cache_size=1000, vllm_config=config)
    assert manager.geometry == BlockGeometry(256, 5)


class NamedByAUser(ReportingEncoderCacheManager):
    """A subclass of ours, outside the package."""


@needs_named_managers
def test_a_class_that_the_user_named_is_kept_and_bound_where_it_can_report() -> None:
    config = vllm_config()
    config.ec_manager_config.encoder_cache_manager_cls = f"{__name__}.{NamedByAUser.__name__}"
    config.ec_manager_config.manager_config = {"theirs": 1}
    residency = DeviceResidency(lambda: None)
    assert install_reporting_manager(config, residency)
    assert config.ec_manager_config.get_encoder_cache_manager_obj().__name__ == "NamedByAUser"
    assert config.ec_manager_config.manager_config["theirs"] == 1
    config.ec_manager_config.get_encoder_cache_manager_obj().create_manager(cache_size=8, vllm_config=config)
    assert residency.has_manager
    config.ec_manager_config.encoder_cache_manager_cls = STOCK
    assert not install_reporting_manager(config, residency)
