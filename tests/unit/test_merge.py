# SPDX-License-Identifier: Apache-2.0
"""Merging blocks into a batch: bit for bit what a plain loop makes of them, in one graph for every layout."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.merge import (
    ItemPlacement,
    build_vision_positions,
    global_to_local_positions,
    merge_vision_embeddings,
    split_deepstack,
)

HIDDEN = 3
MAX_BLOCKS = 8
DTYPE = torch.bfloat16


@dataclass
class Item:
    """Blocks of an item and its placeholders in a prompt."""

    block_ids: list[int]
    tokens_per_block: list[int]
    offset: int
    is_embed: list[bool]


@dataclass
class Layout:
    """One step: a chunk of a prompt, somewhere in a batch, and the buffer that holds the prompt's items."""

    items: list[Item]
    block_size: int
    levels: int
    chunk: range
    """Of the prompt."""
    first_position: int
    """Where the chunk begins in the batch."""
    num_tokens: int
    """Of the batch."""
    buffer: torch.Tensor
    """`[num_blocks, block_size, fat_dim]`; NaN in every row that is not a real token. The last block is scratch."""
    hidden_states: torch.Tensor

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """Views, each an object of its own."""
        ids = [block_id for item in self.items for block_id in item.block_ids]
        scratch = len(self.buffer) - 1
        return tuple(self.buffer[block_id] for block_id in ids + [scratch] * (MAX_BLOCKS - len(ids)))

    def placements(self) -> list[ItemPlacement]:
        return [
            ItemPlacement.in_chunk(
                item.tokens_per_block,
                offset=item.offset,
                is_embed=torch.tensor(item.is_embed, dtype=torch.bool),
                chunk_start=self.chunk.start,
                chunk_end=self.chunk.stop,
                first_position=self.first_position,
            )
            for item in self.items
        ]

    def positions(self) -> torch.Tensor:
        return build_vision_positions(
            self.placements(), max_blocks=MAX_BLOCKS, block_size=self.block_size, num_tokens=self.num_tokens
        )

    def by_loop(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the merge must come to, token by token."""
        merged = self.hidden_states.clone()
        deepstack = torch.zeros(self.levels, self.num_tokens, HIDDEN, dtype=DTYPE)
        for item in self.items:
            places = [
                (at, row) for at, n in zip(item.block_ids, item.tokens_per_block, strict=True) for row in range(n)
            ]
            taking = [item.offset + index for index, takes in enumerate(item.is_embed) if takes]
            for (block_id, row), token in zip(places, taking, strict=True):
                if token in self.chunk:
                    position = self.first_position + token - self.chunk.start
                    fat = self.buffer[block_id, row]
                    merged[position] = fat[:HIDDEN]
                    for level in range(self.levels):
                        deepstack[level, position] = fat[HIDDEN * (level + 1) : HIDDEN * (level + 2)]
        return merged, deepstack


def make_layout(
    rng: random.Random, *, block_size: int | None = None, levels: int | None = None, num_tokens: int | None = None
) -> Layout:
    """Items packed or not, with placeholders between theirs, cut by a chunk that lies anywhere."""
    block_size = block_size or rng.randint(1, 5)
    levels = rng.randint(0, 3) if levels is None else levels
    ids = rng.sample(range(2 * MAX_BLOCKS), MAX_BLOCKS)
    items: list[Item] = []
    end = rng.randint(0, 3)
    while ids and rng.random() < 0.8:
        counts = [rng.randint(0, block_size) for _ in range(rng.randint(1, min(3, len(ids))))]
        is_embed = [True] * sum(counts) + [False] * rng.randint(0, 4)
        rng.shuffle(is_embed)
        items.append(Item([ids.pop() for _ in counts], counts, end, is_embed))
        end += len(is_embed) + rng.randint(0, 3)
    chunk_start = rng.randint(0, end // 2)
    chunk = range(chunk_start, min(rng.randint(chunk_start, end), chunk_start + (num_tokens or end)))
    if num_tokens is None:
        num_tokens = -(-(len(chunk) + rng.randint(1, 6)) // 4) * 4
    fat_dim = HIDDEN * (levels + 1)
    buffer = torch.full((2 * MAX_BLOCKS + 1, block_size, fat_dim), torch.nan, dtype=DTYPE)
    for item in items:
        for block_id, count in zip(item.block_ids, item.tokens_per_block, strict=True):
            buffer[block_id, :count] = torch.randn(count, fat_dim)
    first_position = rng.randint(0, num_tokens - len(chunk))
    hidden_states = torch.randn(num_tokens, HIDDEN).to(DTYPE)
    return Layout(items, block_size, levels, chunk, first_position, num_tokens, buffer, hidden_states)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Bit for bit."""
    for our, their in zip(ours, theirs, strict=True):
        assert our.shape == their.shape and our.dtype == their.dtype
        assert torch.equal(our.contiguous().view(torch.int16), their.contiguous().view(torch.int16))


# -- Against the loop -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_merge_is_what_a_loop_over_tokens_makes(rng: random.Random) -> None:
    layout = make_layout(rng)
    hidden_states, buffer = layout.hidden_states.clone(), layout.buffer.clone()
    assert_equal(
        merge_vision_embeddings(layout.hidden_states, layout.blocks, layout.positions()),
        layout.by_loop(),
    )
    assert_equal((layout.hidden_states, layout.buffer), (hidden_states, buffer))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_put_together_are_the_whole(world_size: int, rng: random.Random) -> None:
    layout = make_layout(rng)
    shards = [
        merge_vision_embeddings(
            hidden_states,
            layout.blocks,
            global_to_local_positions(
                layout.positions(), rank=rank, world_size=world_size, num_tokens=layout.num_tokens
            ),
        )
        for rank, hidden_states in enumerate(layout.hidden_states.chunk(world_size))
    ]
    assert len(shards) == world_size
    together = (torch.cat([merged for merged, _ in shards]), torch.cat([levels for _, levels in shards], dim=1))
    assert_equal(together, layout.by_loop())


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 7))
def test_chunks_one_after_another_place_every_token_once(rng: random.Random, chunk_size: int) -> None:
    item = next(item for _ in iter(int, 1) for item in make_layout(rng, block_size=4).items)
    end = item.offset + len(item.is_embed)
    placed: list[int] = []
    for start in range(0, end, chunk_size):
        placement = ItemPlacement.in_chunk(
            item.tokens_per_block,
            offset=item.offset,
            is_embed=torch.tensor(item.is_embed, dtype=torch.bool),
            chunk_start=start,
            chunk_end=start + chunk_size,
            first_position=0,
        )
        assert placement.first_token == len(placed) or not len(placement.positions)
        placed += (placement.positions + start).tolist()
    assert placed == [item.offset + index for index, takes in enumerate(item.is_embed) if takes]


# -- Positions --------------------------------------------------------------------------------------------------------


def positions_of(*placements: ItemPlacement, max_blocks: int = 3, num_tokens: int = 9) -> list[list[int]]:
    table = build_vision_positions(placements, max_blocks=max_blocks, block_size=3, num_tokens=num_tokens)
    assert table.dtype == torch.int64
    return table.tolist()


def test_what_has_no_place_has_the_sentinel() -> None:
    image = ItemPlacement(torch.tensor([0, 1]), [2])
    video = ItemPlacement(torch.tensor([4, 6, 7], dtype=torch.int32), [1, 2])
    assert positions_of(image, video) == [[0, 1, 9], [4, 9, 9], [6, 7, 9]]
    assert positions_of() == positions_of(ItemPlacement(torch.tensor([], dtype=torch.int64), [])) == [[9] * 3] * 3


def test_an_item_that_was_begun_goes_on_where_it_stood() -> None:
    assert positions_of(ItemPlacement(torch.tensor([0, 1]), [2, 0, 3], first_token=1)) == [
        [9, 0, 9],
        [9] * 3,
        [1, 9, 9],
    ]


def test_a_chunk_without_the_item_leaves_its_blocks_unused() -> None:
    for start, end in ((0, 10), (13, 20), (11, 11)):
        item = ItemPlacement.in_chunk([3], offset=10, chunk_start=start, chunk_end=end, first_position=0)
        assert positions_of(item) == [[9] * 3] * 3


def test_without_a_mask_all_placeholders_take_a_token() -> None:
    item = ItemPlacement.in_chunk([3, 2], offset=10, chunk_start=12, chunk_end=14, first_position=5)
    assert positions_of(item) == [[9, 9, 5], [6, 9, 9], [9] * 3]


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([ItemPlacement(torch.tensor([0]), [1, 0, 0, 0])], "take 4 blocks, max_blocks = 3"),
        ([ItemPlacement(torch.tensor([0]), [4])], "block of 4 tokens, block_size = 3"),
        ([ItemPlacement(torch.tensor([0]), [2, -1])], "block of -1 tokens"),
        ([ItemPlacement(torch.tensor([0, 1]), [1])], "tokens 0 to 2, its blocks hold 1"),
        ([ItemPlacement(torch.tensor([0]), [2], first_token=2)], "tokens 2 to 3, its blocks hold 2"),
        ([ItemPlacement(torch.tensor([0]), [2], first_token=-1)], "tokens -1 to 0"),
        ([ItemPlacement(torch.tensor([8, 9]), [2])], "position 9 is outside of the batch's 9 tokens"),
        ([ItemPlacement(torch.tensor([-1]), [1])], "position -1 is outside"),
        ([ItemPlacement(torch.tensor([4]), [1]), ItemPlacement(torch.tensor([4]), [1])], "position 4 is given to two"),
    ],
)
def test_placements_that_do_not_fit(placements: list[ItemPlacement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        positions_of(*placements)


@pytest.mark.parametrize("positions", [torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), torch.tensor(0)])
def test_positions_of_another_kind(positions: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"give int64 or int32 \[tokens\]"):
        ItemPlacement(positions, [1])


def test_a_mask_of_another_item() -> None:
    with pytest.raises(ValueError, match="2 placeholders take a token of the item, whose blocks hold 3"):
        ItemPlacement.in_chunk(
            [3],
            offset=0,
            is_embed=torch.tensor([True, False, True]),
            chunk_start=0,
            chunk_end=3,
            first_position=0,
        )


# -- Widths, shapes, shards -------------------------------------------------------------------------------------------


def test_deepstack_levels_follow_the_embedding() -> None:
    fat = torch.arange(24).view(2, 12)
    embedding, levels = split_deepstack(fat, 4)
    assert torch.equal(embedding, fat[:, :4])
    assert torch.equal(levels, torch.stack((fat[:, 4:8], fat[:, 8:])))
    assert embedding.untyped_storage().data_ptr() == levels.untyped_storage().data_ptr() == fat.data_ptr()


def test_no_deepstack_is_no_levels() -> None:
    assert split_deepstack(torch.zeros(2, 4), 4)[1].shape == (0, 2, 4)


def test_embeddings_take_the_dtype_of_the_hidden_states() -> None:
    merged, levels = merge_vision_embeddings(
        torch.zeros(2, 2), (torch.ones(1, 4, dtype=torch.bfloat16),), torch.tensor([[1]])
    )
    assert merged.tolist() == [[0, 0], [1, 1]] and merged.dtype == levels.dtype == torch.float32


@pytest.mark.parametrize(("fat_dim", "hidden_size"), [(10, 4), (2, 4), (0, 4), (4, 0)])
def test_widths_that_do_not_divide(fat_dim: int, hidden_size: int) -> None:
    with pytest.raises(ValueError, match=f"width {fat_dim} do not go with a hidden size of {hidden_size}"):
        split_deepstack(torch.zeros(1, fat_dim), hidden_size)


@pytest.mark.parametrize(
    ("hidden_states", "shapes", "positions", "message"),
    [
        ((4,), [(2, 4)], (1, 2), "hidden states of shape"),
        ((4, 4), [], (0, 2), "no blocks to merge"),
        ((4, 4), [(2, 4), (3, 4)], (2, 2), "views of one buffer"),
        ((4, 4), [(2,)], (1, 2), "views of one buffer"),
        ((4, 4), [(2, 4)], (2, 2), "do not go with 1 blocks of 2 tokens"),
        ((4, 4), [(2, 6)], (1, 2), "width 6 do not go with a hidden size of 4"),
    ],
)
def test_shapes_that_do_not_go_together(
    hidden_states: tuple[int, ...], shapes: list[tuple[int, ...]], positions: tuple[int, int], message: str
) -> None:
    blocks = tuple(torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        merge_vision_embeddings(torch.zeros(hidden_states), blocks, torch.zeros(positions, dtype=torch.int64))


def test_other_shards_tokens_get_the_local_sentinel() -> None:
    positions = torch.tensor([[0, 3, 4], [7, 8, 8]])
    assert global_to_local_positions(positions, rank=0, world_size=2, num_tokens=8).tolist() == [[0, 3, 4], [4, 4, 4]]
    assert global_to_local_positions(positions, rank=1, world_size=2, num_tokens=8).tolist() == [[4, 4, 0], [3, 4, 4]]


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 3, "pad the batch to 9 tokens"),
        (2, 2, "rank = 2 does not exist"),
        (-1, 2, "rank = -1 does not exist"),
        (0, 0, "world_size = 0"),
    ],
)
def test_shards_that_do_not_exist(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_to_local_positions(torch.tensor([[0]]), rank=rank, world_size=world_size, num_tokens=8)


# -- Compiled ---------------------------------------------------------------------------------------------------------


class CountingBackend:
    """A backend of torch.compile that counts what it is given: a graph break or a new compilation is one more."""

    def __init__(self, name: str) -> None:
        self._backend = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return self._backend(graph, inputs)


def merge_shard(
    hidden_states: torch.Tensor, blocks: tuple[torch.Tensor, ...], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank's prefill graph has of it: the second of two ranks."""
    local = global_to_local_positions(positions, rank=1, world_size=2, num_tokens=2 * len(hidden_states))
    return merge_vision_embeddings(hidden_states, blocks, local)


@pytest.fixture
def _no_graphs_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# aot_eager shows on any machine what Dynamo and functionalisation make of it. Inductor lowers the scatter to code of
# its own, where writes of padding could go astray, but on a CPU it needs a C++ compiler.
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
    ),
]


@pytest.mark.usefixtures("_no_graphs_before")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("merge", [merge_vision_embeddings, merge_shard])
def test_every_layout_runs_in_the_same_graph(backend: str, merge: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    counting = CountingBackend(backend)
    compiled = torch.compile(merge, backend=counting, fullgraph=True, dynamic=False)
    rng = random.Random(7)
    seen = set()
    with torch.inference_mode():
        while len(seen) < 50:
            layout = make_layout(rng, block_size=4, levels=2, num_tokens=24)
            positions = layout.positions()
            seen.add(tuple(positions.flatten().tolist()))
            hidden_states = layout.hidden_states if merge is merge_vision_embeddings else layout.hidden_states[12:]
            ours = compiled(hidden_states, layout.blocks, positions)
            assert_equal(ours, merge(hidden_states, layout.blocks, positions))
    assert counting.graphs == 1


@pytest.mark.usefixtures("_no_graphs_before")
def test_one_scratch_view_given_many_times_compiles_anew() -> None:
    """Why `blocks` must be objects of their own: if this ever fails, the docstring can be relaxed."""
    counting = CountingBackend("aot_eager")
    compiled = torch.compile(merge_vision_embeddings, backend=counting, fullgraph=True, dynamic=False)
    buffer, positions = torch.zeros(9, 2, HIDDEN), torch.full((8, 2), 4)
    for real in range(3):
        blocks = (*buffer[:real], *[buffer[8]] * (8 - real))
        compiled(torch.zeros(4, HIDDEN), blocks, positions)
    assert counting.graphs == 3
