# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for vllm-neuron behave as its contract says, and each of its faults bites."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request

from storage_tiers.device_copy import CompiledScatterCopies, copies_for
from tests.neuron import contract_cache
from tests.neuron.contract_cache import DeviceTensor, EncoderCacheBlocks, device_compiler
from tests.neuron.contract_plugin import ContractRunner, ContractWorker, ECLoadFailure, frame_tokens_per_block
from tests.neuron.items import kwargs_of, video
from tests.scheduler.items import DTYPE, WIDTH, Image, encode, kwargs_item, make_request, seed_of
from tests.scheduler.runner import Told

CAT, DOG = Image("cat", rows=6), Image("dog", rows=9)
CLIP = video("clip", frames=5, frame_tokens=3)


def blocks(num_blocks: int = 9, block_size: int = 4, **options: Any) -> EncoderCacheBlocks:
    return EncoderCacheBlocks(num_blocks, block_size, WIDTH, **options)


def rows_of(image: Image) -> torch.Tensor:
    return encode(seed_of(image.picture), image.rows, image.modality, "", 0)


# -- The cache ------------------------------------------------------------------------------------------------------


def test_blocks_come_first_in_first_out_and_never_the_scratch_block() -> None:
    cache = blocks(5)
    assert cache.scratch_block_id == 4 and cache.num_free_blocks == 4
    assert cache.allocate("a", [4, 2]) == [0, 1] and cache.allocate("b", [1]) == [2]
    assert cache.allocate("a", [4, 4, 4]) == [0, 1], "what is there stays, whatever is asked for"
    cache.free("a")
    cache.free("absent")
    assert cache.allocate("c", [1, 1]) == [3, 0]
    assert cache.get_tokens_per_block("c") == [1, 1] and cache.get_num_tokens("c") == 2
    cache.clear()
    assert cache.num_free_blocks == 4 and not cache.contains("c")


def test_an_absent_item_is_none_and_the_cache_is_no_mapping() -> None:
    cache = blocks()
    cache.mark_written("a")
    assert cache.get("a") is cache.get_block_ids("a") is cache.get_num_tokens("a") is None
    assert cache.get_tokens_per_block("a") is None
    for use in (lambda: "a" in cache, lambda: cache["a"], lambda: len(cache), lambda: iter(cache)):  # type: ignore
        with pytest.raises(TypeError):
            use()


def test_put_and_get_without_pads() -> None:
    cache, short, long = blocks(), torch.randn(3, WIDTH).to(DTYPE), torch.randn(10, WIDTH).to(DTYPE)
    cache.put("short", short)
    cache.put("long", long)
    cache.put("short", long)
    assert {mm_hash: len(tensor) for mm_hash, tensor in cache.items()} == {"short": 3, "long": 10}
    got_short, got_long = cache.get("short"), cache.get("long")
    assert got_short is not None and torch.equal(got_short, short) and got_short.data_ptr() == cache.buffer.data_ptr()
    assert got_long is not None and torch.equal(got_long, long)
    cache.clear()
    assert not got_short.any() and got_long.any()


@pytest.mark.parametrize(("n", "dense"), [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_dense_tokens_per_block(n: int, dense: list[int]) -> None:
    assert EncoderCacheBlocks.dense_tokens_per_block(n, 4) == dense


def test_a_full_cache_raises_at_once_where_nothing_is_held() -> None:
    cache = blocks(3, min_hold_time_ms=10_000)
    cache.allocate("a", [4, 4])
    with pytest.raises(RuntimeError, match="Encoder cache full: cannot allocate"):
        cache.allocate("b", [4])
    assert cache.slept_seconds == 0
    cache.free("a")
    assert cache.num_free_blocks == 2, "never marked as written: not held"


class Clock:
    """Stands in for `time`: it goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.steps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.steps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(contract_cache, "time", made)
    return made


def test_a_full_cache_sleeps_up_to_the_hold_time_and_then_raises(clock: Clock) -> None:
    """The items that are held come free after their time, and are too few."""
    cache = blocks(5, min_hold_time_ms=30)
    cache.allocate("kept", [4, 4])
    cache.put("held", torch.zeros(1, WIDTH, dtype=DTYPE))
    cache.put("later", torch.zeros(1, WIDTH, dtype=DTYPE))
    cache.free("held")
    clock.now += 0.01
    cache.mark_written("later")
    cache.free("later")
    assert cache.num_free_blocks == 0
    with pytest.raises(RuntimeError, match="Encoder cache full: cannot allocate 3 blocks"):
        cache.allocate("b", [4, 4, 4])
    assert cache.slept_seconds == pytest.approx(0.03, abs=0.0015) == sum(clock.steps)
    assert max(clock.steps) <= 0.001


def test_held_blocks_come_back_after_the_hold_time_or_with_their_hash(clock: Clock) -> None:
    cache = blocks(3, min_hold_time_ms=20)
    for mm_hash in ("a", "b"):
        cache.put(mm_hash, torch.zeros(1, WIDTH, dtype=DTYPE))
        cache.free(mm_hash)
    cache.reclaim_held()
    assert cache.num_free_blocks == 0
    assert cache.allocate("b", [1]) == [1] and cache.slept_seconds == 0
    assert cache.allocate("c", [1]) == [0] and cache.slept_seconds == pytest.approx(0.02, abs=0.0015)
    cache.mark_written("c")
    clock.now += 0.021
    cache.free("c")
    assert cache.num_free_blocks == 1, "its time was over before"
    cache.put("d", torch.zeros(1, WIDTH, dtype=DTYPE))
    cache.free("d")
    clock.now += 0.021
    assert cache.num_free_blocks == 0
    cache.reclaim_held()
    assert cache.num_free_blocks == 1


# -- A device that refuses eager writes -----------------------------------------------------------------------------


def _add_in_place(tensor: torch.Tensor) -> None:
    tensor += 1


WRITES = {
    "copy_": lambda t: t.copy_(torch.ones(())),
    "zero_": lambda t: t.zero_(),
    "setitem": lambda t: t.__setitem__(0, 1),
    "index_put_": lambda t: t.index_put_((torch.tensor([0]),), torch.ones((), dtype=DTYPE)),
    "index_copy_": lambda t: torch.Tensor.index_copy_(t, 0, torch.tensor([0]), torch.ones_like(t[:1])),
    "iadd": _add_in_place,
    "out": lambda t: torch.add(torch.ones(t.shape, dtype=DTYPE), 1, out=t),
    "foreach": lambda t: torch._foreach_copy_([t], [torch.ones(t.shape, dtype=DTYPE)]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_eager_writes_are_refused_when_told_to(write: Any) -> None:
    cache = blocks(refuse_eager_writes=True)
    for target in (cache.buffer, cache.buffer[2], cache.buffer[3, :2], cache.buffer.data.view(-1, WIDTH)):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"in-place writes .* not supported"):
            write(target)
    assert not cache.graph_memory.any()
    with pytest.raises(RuntimeError, match="in-place writes"):
        cache.put("a", torch.ones(3, WIDTH, dtype=DTYPE))
    write(blocks().buffer)


def test_reads_are_not_refused_and_leave_the_device() -> None:
    cache = blocks(refuse_eager_writes=True)
    cache.graph_memory.fill_(1)
    host = torch.zeros(2, 4, WIDTH, dtype=DTYPE)
    host.copy_(cache.buffer[:2])
    assert host.all()
    cache.allocate("a", [4, 2])
    dense = cache.get("a")
    for copy in (cache.buffer.to("cpu"), cache.buffer[1].cpu(), dense, torch.stack(cache.buffer.unbind())):
        assert copy is not None and not isinstance(copy, DeviceTensor)
        copy.zero_()
    assert cache.graph_memory.all()
    assert isinstance(cache.buffer[0, 1:], DeviceTensor) and cache.buffer.is_contiguous()
    with pytest.raises(TypeError, match="not host memory"):
        cache.buffer[0].view(torch.uint8).numpy()
    cache.clear()
    assert not cache.buffer.any()


@pytest.mark.parametrize("backend", [device_compiler, pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_scatter_writes_there(backend: Any) -> None:
    cache, source = blocks(refuse_eager_writes=True), torch.randn(11, WIDTH).to(DTYPE)
    copies = copies_for(cache.buffer, "auto", blocks_per_call=2, backend=backend)
    assert isinstance(copies, CompiledScatterCopies)
    ids = cache.allocate("a", cache.dense_tokens_per_block(11, 4))
    copies.write(ids, source)
    assert torch.equal(cache.graph_memory[ids].view(-1, WIDTH)[:11], source)
    target = torch.zeros_like(source)
    copies.read(ids, 11, target)
    dense = cache.get("a")
    assert torch.equal(target, source) and dense is not None and torch.equal(dense, source)


# -- The runner -----------------------------------------------------------------------------------------------------


class FakeConnector:
    """Notes the runner's calls, and loads what the metadata names, as a plugin's connector must."""

    def __init__(self, *images: Image, failed: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.images = {image.identifier: image for image in images}
        self.failed = failed
        self.calls: list[str] = []
        self.bound: Any = None
        self.registered: list[tuple[torch.Tensor, int]] = []

    def register_and_serve(self, buffer: torch.Tensor, *, tp_rank: int) -> None:
        self.registered.append((buffer, tp_rank))

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.calls.append("bind")
        self.bound = metadata

    def start_load_caches(self, encoder_cache: EncoderCacheBlocks, *, metadata: Any) -> None:
        self.calls.append("load")
        assert metadata is self.bound
        for mm_hash, entry in metadata.load.items():
            parts = torch.split(rows_of(self.images[mm_hash]), encoder_cache.block_size)
            for block_id, part in zip(entry["local_block_ids"], parts, strict=True):
                encoder_cache.buffer[block_id, : len(part)] = part

    def clear_connector_metadata(self) -> None:
        self.calls.append("clear")

    def wait_for_load(self) -> set[str]:
        self.calls.append("wait")
        return self.failed


class Engine:
    """A runner and hand-made scheduler outputs."""

    def __init__(
        self,
        connector: Any,
        cache: EncoderCacheBlocks | None = None,
        *,
        is_producer: bool = True,
        is_consumer: bool = True,
        **options: Any,
    ) -> None:
        self.told, self.cache = Told(), cache or blocks()
        self.runner = ContractRunner(
            connector, self.told, self.cache, is_producer=is_producer, is_consumer=is_consumer, **options
        )

    def request(self, name: str, parts: Sequence[int | Image], kwargs_of: Any = kwargs_of) -> Request:
        self.told.images[name] = [part for part in parts if isinstance(part, Image)]
        return make_request(name, parts, kwargs_of=kwargs_of)

    def step(
        self,
        *new: Request,
        tokens: dict[str, int] | None = None,
        computed: dict[str, int] | None = None,
        encode: dict[str, list[int]] | None = None,
        load: dict[str, Any] | None = None,
        metadata: Any = None,
        freed: Sequence[str] = (),
    ) -> Any:
        """One step; a new request gets its whole prompt, unless `tokens` says otherwise."""
        tokens = {each.request_id: each.num_prompt_tokens for each in new} if tokens is None else tokens
        computed = computed or {}
        output: Any = SimpleNamespace(
            finished_req_ids=set(),
            free_encoder_mm_hashes=list(freed),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.request_id,
                    prompt_token_ids=each.prompt_token_ids,
                    mm_features=each.mm_features,
                    lora_request=each.lora_request,
                    num_computed_tokens=0,
                )
                for each in new
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(computed), num_computed_tokens=list(computed.values())),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_encoder_inputs=encode or {},
            ec_connector_metadata=metadata or SimpleNamespace(load=load or {}),
        )
        return self.runner.execute_model(output)


def load_of(*images: Image) -> dict[str, Any]:
    return {image.identifier: {"num_tokens": image.rows} for image in images}


def test_a_prefill_step_in_the_contracts_order() -> None:
    connector = FakeConnector(DOG)
    engine = Engine(connector, rank=1)
    assert connector.registered == [(engine.cache.buffer, 1)]
    result = engine.step(engine.request("r", [2, CAT, 1, DOG, CAT]), encode={"r": [0]}, load=load_of(DOG))
    assert connector.calls == ["bind", "load", "clear", "wait"]
    assert engine.runner.encoded == {CAT.identifier: 1}
    assert engine.runner.gathered == [("r", each.identifier) for each in (CAT, DOG, CAT)]
    assert not engine.runner.unfilled and result.sampled_token_ids == [[3]] and result.req_ids == ["r"]
    assert result.ec_connector_output is None


def test_chunks_of_a_prompt_and_two_requests_in_a_step() -> None:
    connector = FakeConnector()
    engine = Engine(connector)
    masked = Image("masked", rows=5, row_tokens=2)
    a, b = engine.request("a", [1, CAT, masked]), engine.request("b", [CAT, 2])
    first = engine.step(a, b, tokens={"a": 4, "b": 3}, encode={"a": [0]})
    last = engine.step(tokens={"b": 5, "a": 10}, computed={"b": 3, "a": 4}, encode={"a": [1]})
    assert first.sampled_token_ids == [[], []] and last.sampled_token_ids == [[3], [3]]
    assert connector.calls == ["bind", "clear", "wait"] * 2, "no load: start_load_caches is not called"
    assert len(engine.runner.gathered) == 5 and not engine.runner.unfilled
    engine.step(engine.request("c", [CAT]), encode={"c": [0]})
    assert engine.runner.encoded[CAT.identifier] == 1, "not again, since the cache has it"


def test_a_decode_only_step_and_one_without_tokens_call_no_connector_but_free() -> None:
    connector = FakeConnector()
    engine = Engine(connector)
    engine.step(engine.request("r", [CAT, DOG]), encode={"r": [0, 1]})
    connector.calls.clear()
    result = engine.step(tokens={"r": 1}, computed={"r": 15}, freed=[CAT.identifier], load=load_of(CAT))
    assert result.sampled_token_ids == [[3]] and not engine.cache.contains(CAT.identifier)
    assert engine.step(tokens={}, freed=[DOG.identifier]) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not engine.cache.contains(DOG.identifier)
    assert not connector.calls


def test_an_item_absent_from_the_load_is_skipped_without_a_word() -> None:
    engine = Engine(FakeConnector(DOG))
    result = engine.step(engine.request("r", [CAT, DOG]), load=load_of(DOG))
    assert engine.runner.unfilled == [("r", CAT.identifier)] and engine.runner.gathered == [("r", DOG.identifier)]
    assert result.sampled_token_ids == [[3]]


def test_a_failed_load_ends_the_engine() -> None:
    engine = Engine(FakeConnector(CAT, failed={CAT.identifier}))
    with pytest.raises(ECLoadFailure, match=CAT.identifier):
        engine.step(engine.request("r", [CAT]), load=load_of(CAT))


def test_metadata_without_load_ends_the_engine() -> None:
    engine = Engine(FakeConnector())
    with pytest.raises(AttributeError, match="load"):
        engine.step(engine.request("r", [1]), metadata=SimpleNamespace(saves={}))


def test_wrong_rows_are_found() -> None:
    engine = Engine(FakeConnector(CAT, DOG))
    engine.cache.put(CAT.identifier, rows_of(DOG)[: CAT.rows])
    with pytest.raises(AssertionError, match="r got wrong rows"):
        engine.step(engine.request("r", [CAT]))


def test_an_item_without_pixels_ends_the_engine() -> None:
    blank = Image("blank", has_pixels=False)
    engine = Engine(FakeConnector())
    with pytest.raises(RuntimeError, match="without pixels"):
        engine.step(engine.request("r", [blank]), encode={"r": [0]})


@pytest.mark.parametrize("loads", [False, True])
def test_the_full_cache_bites_on_encode_and_on_load(loads: bool) -> None:
    engine = Engine(FakeConnector(DOG), blocks(3))
    with pytest.raises(RuntimeError, match="Encoder cache full"):
        engine.step(engine.request("r", [DOG]), encode={} if loads else {"r": [0]}, load=load_of(DOG) if loads else {})


def test_a_producer_alone_neither_loads_nor_gathers_nor_samples() -> None:
    connector = FakeConnector(DOG)
    engine = Engine(connector, is_consumer=False)
    result = engine.step(engine.request("r", [CAT]), encode={"r": [0]}, load=load_of(DOG))
    assert result.sampled_token_ids == [[]] and engine.cache.contains(CAT.identifier)
    assert not connector.calls and not engine.runner.gathered


@pytest.mark.parametrize("copies_metadata", [False, True])
def test_block_ids_are_written_into_the_schedulers_own_entries_only_without_a_copy(copies_metadata: bool) -> None:
    engine, load = Engine(FakeConnector(CAT), copies_metadata=copies_metadata), load_of(CAT)
    engine.step(engine.request("r", [CAT]), load=load)
    assert ("local_block_ids" in load[CAT.identifier]) is not copies_metadata


def test_the_encoder_writes_where_eager_writes_are_refused_and_a_careless_connector_does_not() -> None:
    engine = Engine(FakeConnector(DOG), blocks(refuse_eager_writes=True))
    engine.step(engine.request("r", [CAT]), encode={"r": [0]})
    assert engine.runner.gathered
    with pytest.raises(RuntimeError, match="in-place writes"):
        engine.step(engine.request("q", [DOG]), load=load_of(DOG))


# -- Videos ---------------------------------------------------------------------------------------------------------


def test_frames_are_packed_whole_and_the_pads_are_garbage() -> None:
    engine = Engine(FakeConnector(), blocks(block_size=8))
    engine.step(engine.request("r", [2, CLIP]), encode={"r": [0]})
    assert engine.cache.get_tokens_per_block(CLIP.identifier) == [6, 6, 3]
    dense, ids = engine.cache.get(CLIP.identifier), engine.cache.get_block_ids(CLIP.identifier)
    assert dense is not None and torch.equal(dense, rows_of(CLIP)) and ids is not None
    assert engine.cache.buffer[ids[0], 6:].isnan().all()
    assert engine.runner.gathered == [("r", CLIP.identifier)]


def test_a_video_that_was_loaded_lies_densely() -> None:
    engine = Engine(FakeConnector(CLIP), blocks(block_size=8))
    engine.step(engine.request("r", [CLIP]), load=load_of(CLIP))
    assert engine.cache.get_tokens_per_block(CLIP.identifier) == [8, 7] and engine.runner.gathered


def test_videos_that_cannot_be() -> None:
    assert frame_tokens_per_block(12, 4, 4) == [4, 4, 4]
    with pytest.raises(ValueError, match="frame of 5 tokens does not fit into a block of 4"):
        frame_tokens_per_block(10, 5, 4)
    engine = Engine(FakeConnector())
    wrong = engine.request("r", [CLIP], lambda clip: kwargs_of(video("clip", frames=4, frame_tokens=3)))
    with pytest.raises(ValueError, match="4 frames of 3 tokens are not 15 placeholders"):
        engine.step(wrong, encode={"r": [0]})


def test_processed_items_hold_a_grid_of_their_modality() -> None:
    clip, cat = kwargs_of(CLIP), kwargs_of(CAT)
    assert clip["video_grid_thw"].data.tolist() == [5, 2, 6] and "image_grid_thw" not in clip
    assert cat["image_grid_thw"].data.tolist() == [1, 2, 12]
    assert torch.equal(cat["pixel_values"].data, kwargs_item(CAT)["pixel_values"].data)


# -- The worker -----------------------------------------------------------------------------------------------------


def test_the_worker_makes_its_runner_when_it_loads_the_model_and_delegates() -> None:
    config = SimpleNamespace(ec_transfer_config=SimpleNamespace(is_ec_producer=True, is_ec_consumer=False))
    connector = mock.Mock(spec=["register_and_serve"])
    options = {"num_blocks": 5, "block_size": 4, "fat_dim": WIDTH}
    worker = ContractWorker(config, connector, Told(), 2, options)
    assert worker.model_runner is None and worker.device == torch.device("cpu") and worker.rank == 2
    worker.load_model()
    cache = worker.model_runner.encoder_cache
    connector.register_and_serve.assert_called_once_with(cache.buffer, tp_rank=2)
    cache.allocate("a", [1])
    worker.reset_encoder_cache()
    assert not cache.contains("a")
    output: Any = SimpleNamespace(
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        total_num_scheduled_tokens=0,
    )
    assert worker.execute_model(output) is EMPTY_MODEL_RUNNER_OUTPUT
    worker.shutdown()
    assert worker.is_shut_down
