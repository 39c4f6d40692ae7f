# SPDX-License-Identifier: Apache-2.0
"""Copies between blocks and host memory: every strategy leaves the bytes that a loop over tokens leaves."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from storage_tiers import device_copy
from storage_tiers.device_copy import (
    BlockCopies,
    CompiledScatterCopies,
    EagerCopies,
    SideStreamCopies,
    adjacent_runs,
    copies_for,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS_PER_CALL = 3
BACKEND = "aot_eager"
"""Compiles in milliseconds; the default has a test of its own."""
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

needs_streams = pytest.mark.skipif(ACCELERATOR is None, reason="no device with streams here (torch.accelerator)")


def eager(buffer: torch.Tensor) -> BlockCopies:
    return EagerCopies(buffer)


def compiled_scatter(buffer: torch.Tensor) -> BlockCopies:
    return CompiledScatterCopies(buffer, BLOCKS_PER_CALL, BACKEND)


def side_stream(buffer: torch.Tensor) -> BlockCopies:
    """With a ring of one row for each slot, so that nearly every item goes around it."""
    return SideStreamCopies(buffer, staging_bytes=0)


STRATEGIES = [eager, compiled_scatter, pytest.param(side_stream, marks=needs_streams)]


def device_for(build: Callable[[torch.Tensor], BlockCopies]) -> torch.device:
    return ACCELERATOR if build is side_stream and ACCELERATOR is not None else torch.device("cpu")


def random_bits(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Every pattern that the dtype can hold, NaNs with payloads too."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu().contiguous().view(torch.uint8), right.cpu().contiguous().view(torch.uint8))


def written_by_loop(buffer: torch.Tensor, block_ids: Sequence[int], source: torch.Tensor) -> torch.Tensor:
    """What the buffer must hold after a write, made token by token on its bytes."""
    expected = buffer.cpu().clone().view(torch.uint8)
    for block_id in block_ids:
        expected[block_id] = 0
    block_size = buffer.shape[1]
    for token, row in enumerate(source.view(torch.uint8)):
        expected[block_ids[token // block_size], token % block_size] = row
    return expected.view(buffer.dtype)


@st.composite
def items(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """A buffer full of other data, blocks in any order, and an item that ends anywhere in the last of them."""
    num_blocks, block_size, fat_dim = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    num_tokens = draw(st.integers(0, (num_blocks - 1) * block_size))
    count = -(-num_tokens // block_size)
    order = draw(st.sampled_from([sorted, list]))
    block_ids = order(draw(st.permutations(range(num_blocks - 1)))[:count])
    pool = random_bits(seed, num_tokens + 2, fat_dim, dtype=dtype)
    return random_bits(seed + 1, num_blocks, block_size, fat_dim, dtype=dtype), block_ids, pool[1:-1]


@pytest.mark.parametrize("build", STRATEGIES)
@given(item=items())
@settings(max_examples=60, deadline=None)
def test_writes_what_a_loop_writes_and_reads_it_back(
    build: Callable[[torch.Tensor], BlockCopies], item: tuple[torch.Tensor, list[int], torch.Tensor]
) -> None:
    before, block_ids, source = item
    buffer = before.to(device_for(build), copy=True)
    copies = build(buffer)
    copies.write(block_ids, source)
    assert same_bytes(buffer[:-1], written_by_loop(before, block_ids, source)[:-1]), "all but the scratch block"
    target = torch.zeros_like(source)
    copies.read(block_ids, len(source), target)
    copies.synchronize()
    assert same_bytes(target, source)


@pytest.mark.parametrize("build", STRATEGIES)
@pytest.mark.parametrize("writes_under_inference", [False, True])
@pytest.mark.parametrize("made_under_inference", [False, True])
def test_the_callers_inference_mode_does_not_matter(
    build: Callable[[torch.Tensor], BlockCopies], writes_under_inference: bool, made_under_inference: bool
) -> None:
    with torch.inference_mode(made_under_inference):
        buffer, target = torch.ones(6, 4, 2, device=device_for(build)), torch.zeros(9, 2)
        copies = build(buffer)
    source = torch.randn(9, 2)
    with torch.inference_mode(writes_under_inference):
        copies.write([4, 0, 1], source)
        copies.read([4, 0, 1], 9, target)
        copies.synchronize()
    assert torch.equal(target, source)


@pytest.mark.parametrize("build", STRATEGIES)
def test_a_source_on_the_buffers_device_or_with_gaps_between_its_rows(
    build: Callable[[torch.Tensor], BlockCopies],
) -> None:
    wide = random_bits(1, 11, 8)
    buffer = torch.zeros(9, 2, 4, dtype=torch.bfloat16, device=device_for(build))
    for source in (wide[:, :4], wide[:, 4:].to(buffer.device)):
        build(buffer).write([6, 5, 0, 1, 2, 7], source)
        assert same_bytes(buffer, written_by_loop(buffer, [6, 5, 0, 1, 2, 7], source.cpu().contiguous()))


def test_eager_copies_make_no_tensor_of_their_own() -> None:
    """A restore fills the blocks straight from the pool."""
    buffer, source, target = torch.ones(9, 4, 8), torch.randn(30, 8), torch.zeros(30, 8)
    copies = EagerCopies(buffer)
    known = {tensor.untyped_storage().data_ptr() for tensor in (buffer, source, target)}
    seen: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.add(result.untyped_storage().data_ptr())
            return result

    with Watch():
        copies.write([0, 1, 2, 7, 6, 4, 5, 3], source)
        copies.read([0, 1, 2, 7, 6, 4, 5, 3], 30, target)
    assert torch.equal(target, source)
    assert seen and seen <= known


def test_one_compilation_serves_items_of_all_sizes() -> None:
    compilations: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    buffer = random_bits(0, 40, 4, 8)
    copies = CompiledScatterCopies(buffer, 8, counting)
    assert len(compilations) == 1, "at the start, not in a step"
    chance, sizes = random.Random(7), random.Random(8).sample(range(1, 39 * 4), 30)
    for number, num_tokens in enumerate(sizes):
        block_ids = chance.sample(range(39), -(-num_tokens // 4))
        with torch.inference_mode(number % 2 == 0):  # either kind of tensor, of pools and of the runner
            source = random_bits(number, num_tokens + number, 8)[number:]
            expected = written_by_loop(buffer, block_ids, source)
        copies.write(block_ids, source)
        assert same_bytes(buffer[:-1], expected[:-1])
    assert len(compilations) == 1


def test_many_buffers_in_a_process_compile_once_each() -> None:
    """Beyond the eight graphs that the compiler would keep for one function."""
    for num_blocks in range(3, 15):
        buffer = torch.ones(num_blocks, 2, 2)
        compiled_scatter(buffer).write([1, 0], torch.zeros(4, 2))
        assert not buffer[:2].any() and buffer[2:-1].all()


@pytest.mark.slow
def test_the_default_compiler_keeps_every_bit() -> None:
    before, source = random_bits(1, 12, 16, 64), random_bits(2, 70, 64)
    buffer = before.clone()
    CompiledScatterCopies(buffer, 2).write([9, 3, 4, 0, 7], source)
    assert same_bytes(buffer[:-1], written_by_loop(before, [9, 3, 4, 0, 7], source)[:-1])


class RefusesEagerWrites(torch.Tensor):
    """Stands in for a device whose runtime refuses in-place writes, except by what its compiler made.

    What a write does instead: `does_nothing` takes it without a word, otherwise it raises.
    """

    does_nothing = False
    writes = frozenset({torch.Tensor.copy_, torch.Tensor.zero_, torch.Tensor.index_copy_, torch.Tensor.__setitem__})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.writes and isinstance(args[0], cls) and not torch.compiler.is_compiling():
            if cls.does_nothing:
                return args[0]
            raise RuntimeError("in-place writes into shared storage are not supported")
        return super().__torch_function__(func, types, args, kwargs or {})


def its_compiler(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return lambda *inputs: graph(*[each.as_subclass(torch.Tensor) for each in inputs])


@pytest.mark.parametrize("does_nothing", [False, True])
def test_auto_scatters_where_eager_writes_are_refused(does_nothing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RefusesEagerWrites, "does_nothing", does_nothing)
    memory, source = random_bits(1, 8, 4, 8), random_bits(2, 19, 8)
    expected = written_by_loop(memory, [2, 6, 0, 1, 3], source)
    buffer = memory.as_subclass(RefusesEagerWrites)
    copies = copies_for(buffer, backend=its_compiler)
    assert isinstance(copies, CompiledScatterCopies)
    copies.write([2, 6, 0, 1, 3], source)
    assert same_bytes(memory[:-1], expected[:-1])
    target = torch.zeros_like(source)
    copies.read([2, 6, 0, 1, 3], 19, target)
    assert same_bytes(target, source)


@pytest.mark.parametrize("strategy", ["eager", "side_stream"])
def test_a_strategy_that_writes_eagerly_is_refused_there(strategy: Any) -> None:
    buffer = torch.zeros(8, 4, 8).as_subclass(RefusesEagerWrites)
    with pytest.raises(ValueError, match=f"'{strategy}'.*refuses eager writes; 'compiled_scatter' would do"):
        copies_for(buffer, strategy)


def test_auto_copies_eagerly_on_the_cpu_and_leaves_the_blocks_alone() -> None:
    before = random_bits(3, 5, 2, 4)
    buffer = before.clone()
    assert isinstance(copies_for(buffer), EagerCopies)
    assert same_bytes(buffer[:-1], before[:-1])


@needs_streams
def test_auto_takes_a_side_stream_where_there_is_one() -> None:
    assert isinstance(copies_for(torch.zeros(3, 2, 2, device=ACCELERATOR)), SideStreamCopies)


def test_the_strategy_that_was_asked_for() -> None:
    buffer = torch.zeros(5, 2, 4)
    assert isinstance(copies_for(buffer, "eager"), EagerCopies)
    assert isinstance(copies_for(buffer, "compiled_scatter", backend=BACKEND), CompiledScatterCopies)


def test_strategies_that_cannot_be() -> None:
    buffer = torch.zeros(5, 2, 4)
    with pytest.raises(ValueError, match=r"'side_stream': device 'cpu' has no streams .*; 'eager' would do"):
        copies_for(buffer, "side_stream")
    with pytest.raises(ValueError, match="device 'cpu' has no streams"):
        SideStreamCopies(buffer)
    with pytest.raises(ValueError, match="unknown strategy 'fastest': one of auto, eager, side_stream, compiled"):
        copies_for(buffer, "fastest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="blocks_per_call must be 1 or more, not 0"):
        CompiledScatterCopies(buffer, 0, BACKEND)
    with pytest.raises(RuntimeError, match="no_such_compiler"):
        CompiledScatterCopies(buffer, 2, "no_such_compiler")


@pytest.mark.parametrize(
    "buffer", [torch.zeros(5, 4), torch.zeros(1, 2, 4), torch.zeros(5, 2, 8)[..., :4]], ids=["flat", "one", "strided"]
)
def test_buffers_that_cannot_be(buffer: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be contiguous, .num_blocks, block_size, fat_dim"):
        copies_for(buffer)


@pytest.mark.parametrize("build", [eager, compiled_scatter])
@pytest.mark.parametrize(
    ("block_ids", "dense", "message"),
    [
        ([0], torch.zeros(2, 5), r"rows of 4 torch.float32, not a tensor \[2, 5\] of torch.float32"),
        ([0], torch.zeros(2, 4).half(), r"rows of 4 torch.float32, not a tensor \[2, 4\] of torch.float16"),
        ([0], torch.zeros(2, 4, 1), r"rows of 4 torch.float32, not a tensor \[2, 4, 1\]"),
        ([0], torch.zeros(3, 4), "3 tokens in blocks of 2 take 2 blocks, not 1"),
        ([0, 1, 2], torch.zeros(3, 4), "3 tokens in blocks of 2 take 2 blocks, not 3"),
        ([0, 4], torch.zeros(3, 4), r"distinct and within 0 to 3: \[0, 4\]"),
        ([0, -1], torch.zeros(3, 4), r"distinct and within 0 to 3: \[0, -1\]"),
        ([1, 1], torch.zeros(3, 4), r"distinct and within 0 to 3: \[1, 1\]"),
    ],
)
def test_bad_input_writes_nothing(
    build: Callable[[torch.Tensor], BlockCopies], block_ids: list[int], dense: torch.Tensor, message: str
) -> None:
    buffer = torch.ones(5, 2, 4)
    copies = build(buffer)
    with pytest.raises(ValueError, match=message):
        copies.write(block_ids, dense)
    with pytest.raises(ValueError, match=message):
        copies.read(block_ids, len(dense), dense)
    assert buffer[:-1].all()


def test_a_target_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"must have 3 rows and is \[4, 4\]"):
        EagerCopies(torch.ones(5, 2, 4)).read([0, 1], 3, torch.zeros(4, 4))


def test_runs_of_adjacent_blocks() -> None:
    assert adjacent_runs([]) == []
    assert adjacent_runs([3]) == [(3, 1)]
    assert adjacent_runs([3, 4, 5, 0, 1, 7, 6]) == [(3, 3), (0, 2), (7, 1), (6, 1)]


class LazyStream:
    """Stands in for a stream: notes its orders to wait. Its device does the work as soon as it is issued."""

    def __init__(self, device: object = None) -> None:
        self.waited_for: list[LazyStream] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, other: "LazyStream") -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None: ...


class LazyEvent:
    def __init__(self, device: object = None) -> None:
        self.recorded_on: LazyStream | None = None

    def record(self, stream: LazyStream) -> None:
        self.recorded_on = stream

    def synchronize(self) -> None:
        assert self.recorded_on is not None


@pytest.fixture
def compute_stream(monkeypatch: pytest.MonkeyPatch) -> LazyStream:
    """The side stream's own arithmetic without a device: what streams really do is tested in `tests/device`."""
    compute = LazyStream()
    monkeypatch.setattr(torch, "Stream", LazyStream)
    monkeypatch.setattr(torch, "Event", LazyEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    monkeypatch.setattr(device_copy, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(device_copy, "_has_streams", lambda device: True)
    return compute


@pytest.mark.parametrize("ring_rows", [4, 8, 12, 4096])
@pytest.mark.parametrize("pinned", [False, True])
def test_the_pinned_ring_leaves_what_a_loop_leaves(
    compute_stream: LazyStream, ring_rows: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    buffer = random_bits(ring_rows, 10, 4, 8)
    copies = SideStreamCopies(buffer, staging_bytes=ring_rows * 8 * 2)
    chance, targets = random.Random(ring_rows), []
    for num_tokens in (1, 33, 4, 36, 7):
        block_ids = chance.sample(range(9), -(-num_tokens // 4))
        source = random_bits(num_tokens, num_tokens, 8)
        expected = written_by_loop(buffer, block_ids, source)
        copies.write(block_ids, source)
        assert same_bytes(buffer[:-1], expected[:-1])
        targets.append((torch.zeros_like(source), source))
        copies.read(block_ids, num_tokens, targets[-1][0])
    copies.synchronize()
    assert all(same_bytes(target, source) for target, source in targets)
    side = copies._side
    assert side.waited_for == [compute_stream] * 10 and compute_stream.waited_for == [side] * 10


def test_the_streams_wait_for_each_other_after_a_failed_copy_too(
    compute_stream: LazyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SideStreamCopies(torch.zeros(3, 2, 2))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(copies, "_upload", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        copies.write([0], torch.zeros(1, 2))
    assert compute_stream.waited_for == [copies._side]
