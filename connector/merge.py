# SPDX-License-Identifier: Apache-2.0
"""From blocks of the encoder cache to a batch's embeddings: positions made on the host, a scatter of one fixed shape.

Arithmetic on tensors only: no cache, no plan, no vLLM and nothing of a tier may enter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "ItemPlacement",
    "build_vision_positions",
    "global_to_local_positions",
    "merge_vision_embeddings",
    "split_deepstack",
]


@dataclass(frozen=True, slots=True, eq=False)
class ItemPlacement:
    """Where one item's tokens go in this step's batch: some or all of them, in the item's order."""

    positions: torch.Tensor
    """Integers `[tokens]` on the host, one per token of this step: its place in the batch. Gaps are fine."""
    tokens_per_block: Sequence[int]
    """Real tokens of each of the item's blocks, in order; they are a block's first rows, what follows is padding."""
    first_token: int = 0
    """Which of the item's real tokens `positions[0]` is for: above 0 where an earlier step has taken some."""

    def __post_init__(self) -> None:
        if self.positions.ndim != 1 or self.positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"positions of shape {tuple(self.positions.shape)} and {self.positions.dtype} cannot be used; give "
                "int64 or int32 [tokens]"
            )

    @classmethod
    def in_chunk(
        cls,
        tokens_per_block: Sequence[int],
        *,
        offset: int,
        is_embed: torch.Tensor | None = None,
        chunk_start: int,
        chunk_end: int,
        first_position: int,
    ) -> "ItemPlacement":
        """The part of an item that lies in the prompt tokens `chunk_start` to `chunk_end`, the latter excluded.

        The item's placeholders begin at prompt token `offset`; `is_embed`, bool `[placeholders]` on the host, marks
        those that take a token of the item, None all. `first_position` is where the chunk begins in the batch. Raises
        ValueError where placeholders and tokens do not come to the same number.
        """
        num_tokens = sum(tokens_per_block)
        if is_embed is None:
            is_embed = torch.ones(num_tokens, dtype=torch.bool)
        taking = int(is_embed.sum())
        if taking != num_tokens:
            raise ValueError(
                f"{taking} placeholders take a token of the item, whose blocks hold {num_tokens} "
                f"(tokens_per_block = {list(tokens_per_block)}); give is_embed and tokens_per_block of the same item"
            )
        start = min(max(chunk_start - offset, 0), len(is_embed))
        end = max(min(chunk_end - offset, len(is_embed)), start)
        taken = is_embed[start:end].nonzero().flatten()
        first_token = int(is_embed[:start].sum())
        return cls(taken + (first_position + offset + start - chunk_start), tokens_per_block, first_token)


def build_vision_positions(
    placements: Sequence[ItemPlacement], *, max_blocks: int, block_size: int, num_tokens: int
) -> torch.Tensor:
    """Where each row of each block goes in a batch of `num_tokens`: int64 `[max_blocks, block_size]`, on the host.

    Blocks are counted through all items in order, those without a token in this step too; what has no place, be it
    padding or another step's token, has the sentinel `num_tokens`. Raises ValueError for more blocks than
    `max_blocks`, for a block that cannot hold its tokens, for tokens that an item does not have, and for positions
    outside of the batch or given twice.
    """
    _check_fit(placements, max_blocks, block_size)
    _check_positions(placements, num_tokens)
    table = torch.full((max_blocks, block_size), num_tokens, dtype=torch.int64)
    first_block = 0
    for placement in placements:
        counts = torch.tensor(placement.tokens_per_block, dtype=torch.int64)
        ends = counts.cumsum(0)
        tokens = torch.arange(placement.first_token, placement.first_token + len(placement.positions))
        block = torch.searchsorted(ends, tokens, right=True)
        row = tokens - (ends - counts)[block]
        table[first_block + block, row] = placement.positions.to(torch.int64)
        first_block += len(counts)
    return table


def merge_vision_embeddings(
    hidden_states: torch.Tensor, blocks: tuple[torch.Tensor, ...], vision_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states with the blocks' embeddings at their positions, and the deepstack levels of the same tokens.

    `hidden_states [num_tokens, hidden]`; `blocks` each `[block_size, fat_dim]`, padded to a fixed number with views of
    the scratch block; `vision_positions [len(blocks), block_size]` on the same device, built for just this
    `num_tokens`: another sentinel would be a real row, which a graph cannot look for. Returns `[num_tokens, hidden]`
    and `[levels, num_tokens, hidden]`, zero where no vision token is; inputs stay as they are. What padding holds, NaN
    included, reaches neither. Raises ValueError for shapes that do not go together.

    One graph: only shapes are branched on, so other positions and blocks do not compile anew. Every element of
    `blocks` must be a tensor object of its own, though, the scratch views too: a compiler tells tuples apart by which
    of their elements are the same object.
    """
    _check_shapes(hidden_states, blocks, vision_positions)
    num_tokens, hidden_size = hidden_states.shape
    fat = torch.stack(blocks).flatten(0, 1).to(hidden_states.dtype)
    embeddings, deepstack = split_deepstack(fat, hidden_size)
    rows = vision_positions.flatten()
    # The last row takes everything that has the sentinel. What it ends up with depends on the order, and is cut off.
    merged = torch.cat((hidden_states, hidden_states.new_zeros(1, hidden_size)))
    levels = hidden_states.new_zeros(len(deepstack), num_tokens + 1, hidden_size)
    # In place on what was made here: a graph makes nothing of it, and eagerly it saves a copy of each.
    merged.index_copy_(0, rows, embeddings)
    levels.index_copy_(1, rows, deepstack)
    return merged[:num_tokens], levels[:, :num_tokens]


def split_deepstack(fat: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `fat [..., fat_dim]`: the embedding `[..., hidden_size]` and the levels `[levels, ..., hidden_size]`.

    Raises ValueError where `fat_dim` is not `hidden_size * (1 + levels)`.
    """
    fat_dim = fat.shape[-1]
    if hidden_size < 1 or fat_dim < hidden_size or fat_dim % hidden_size:
        raise ValueError(
            f"blocks of width {fat_dim} do not go with a hidden size of {hidden_size}: the width must be a multiple of "
            "it, one for the embedding and one per deepstack level; is the cache another model's?"
        )
    parts = fat.view(*fat.shape[:-1], fat_dim // hidden_size, hidden_size).movedim(-2, 0)
    return parts[0], parts[1:]


def global_to_local_positions(
    vision_positions: torch.Tensor, *, rank: int, world_size: int, num_tokens: int
) -> torch.Tensor:
    """Positions in the shard of `rank`, of `num_tokens / world_size` consecutive tokens; elsewhere its length.

    The shard's length is the sentinel for a merge into the shard. Shape and device stay. Raises ValueError for tokens
    that do not divide evenly, and for a rank that does not exist.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} does not exist among world_size = {world_size} ranks; ranks count from 0")
    if num_tokens % world_size:
        raise ValueError(
            f"num_tokens = {num_tokens} cannot be cut into world_size = {world_size} equal shards; pad the batch to "
            f"{-(-num_tokens // world_size) * world_size} tokens"
        )
    shard = num_tokens // world_size
    local = vision_positions - rank * shard
    return torch.where((local < 0) | (local >= shard), shard, local)


def _check_fit(placements: Sequence[ItemPlacement], max_blocks: int, block_size: int) -> None:
    needed = sum(len(placement.tokens_per_block) for placement in placements)
    if needed > max_blocks:
        raise ValueError(
            f"{len(placements)} items take {needed} blocks, max_blocks = {max_blocks} is less; raise it, or give only "
            "the blocks that have tokens in this step"
        )
    for index, placement in enumerate(placements):
        counts = placement.tokens_per_block
        unfit = next((count for count in counts if not 0 <= count <= block_size), None)
        if unfit is not None:
            raise ValueError(
                f"item {index} has a block of {unfit} tokens, block_size = {block_size}; cut the item into blocks of "
                f"0 to {block_size} tokens"
            )
        start, end = placement.first_token, placement.first_token + len(placement.positions)
        if start < 0 or end > sum(counts):
            raise ValueError(
                f"item {index} is to place its tokens {start} to {end}, its blocks hold {sum(counts)} "
                f"(tokens_per_block = {list(counts)}); give one position per token that is there"
            )


def _check_positions(placements: Sequence[ItemPlacement], num_tokens: int) -> None:
    """Through all items at once: the batch is at fault, and one check is cheaper than one per item."""
    if not placements:
        return
    positions = torch.cat([placement.positions for placement in placements])
    outside = positions[(positions < 0) | (positions >= num_tokens)]
    if len(outside):
        raise ValueError(
            f"position {int(outside[0])} is outside of the batch's {num_tokens} tokens; give positions in the batch, "
            "not in the prompt, and leave out tokens of other steps"
        )
    twice = (positions.bincount(minlength=num_tokens) > 1).nonzero()
    if len(twice):  # which of the two would win is undefined
        raise ValueError(f"position {int(twice[0])} is given to two tokens; items of one batch must not overlap")


def _check_shapes(
    hidden_states: torch.Tensor, blocks: tuple[torch.Tensor, ...], vision_positions: torch.Tensor
) -> None:
    if hidden_states.ndim != 2:
        raise ValueError(f"hidden states of shape {tuple(hidden_states.shape)} cannot be merged; give [tokens, hidden]")
    if not blocks:
        raise ValueError("there are no blocks to merge; pad them with views of the scratch block")
    shape = blocks[0].shape
    if any(block.ndim != 2 or block.shape != shape for block in blocks):
        raise ValueError(
            f"blocks of shapes {[tuple(block.shape) for block in blocks]} cannot be merged; give views of one buffer, "
            "all [block_size, fat_dim]"
        )
    if vision_positions.shape != (len(blocks), shape[0]):
        raise ValueError(
            f"positions of shape {tuple(vision_positions.shape)} do not go with {len(blocks)} blocks of {shape[0]} "
            "tokens; build them with max_blocks and block_size of the padded blocks"
        )
