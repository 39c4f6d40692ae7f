# SPDX-License-Identifier: Apache-2.0
"""Gathering a step's items as views of blocks, beside concatenating dense tensors; and what the merge then costs."""

from collections.abc import Callable

import pytest
import torch

from connector.merge import ItemPlacement, build_vision_positions, merge_vision_embeddings
from tests.benchmarks.measuring import Stopwatch, Timed, by_turns, timed
from tests.benchmarks.table import Table

pytestmark = pytest.mark.timeout(600)

ROUNDS = 15
ITEMS = 30
ITEM_TOKENS = 256
"""A 512x512 image; one block."""
HIDDEN = 5120
LEVELS = 3
FAT_DIM = HIDDEN * (1 + LEVELS)
"""Qwen3-VL 32B."""
DTYPE = torch.bfloat16
NUM_TOKENS = 8192
CACHES_BYTES = 64 << 20
CAT = "torch.cat of dense tensors"
BY_MASK = "torch.cat, then merge by mask"
COMPILED = "views, positions, then the merge compiled"


class Step:
    """One step's items, as blocks of a buffer and as dense tensors, with text before each."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(ITEMS + 1, ITEM_TOKENS, FAT_DIM, dtype=DTYPE)
        self._block_ids = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(0)).tolist()
        row = torch.linspace(-1, 1, FAT_DIM)
        self._dense = [torch.add(row, item).to(DTYPE).repeat(ITEM_TOKENS, 1) for item in range(ITEMS)]
        for block_id, dense in zip(self._block_ids, self._dense, strict=True):
            self._buffer[block_id].copy_(dense)
        self._touched = torch.zeros(ITEMS * ITEM_TOKENS, FAT_DIM, dtype=DTYPE)
        self._hidden_states = torch.ones(NUM_TOKENS, HIDDEN, dtype=DTYPE)
        self._offsets = [item * (NUM_TOKENS // ITEMS) + 16 for item in range(ITEMS)]
        self._is_vision = torch.zeros(NUM_TOKENS, dtype=torch.bool)
        for offset in self._offsets:
            self._is_vision[offset : offset + ITEM_TOKENS] = True
        self._compiled = torch.compile(merge_vision_embeddings, fullgraph=True, dynamic=False)
        self._other, self._another = torch.zeros(2, CACHES_BYTES, dtype=torch.uint8)

    def views(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._buffer[block_id] for block_id in self._block_ids)

    def positions(self) -> torch.Tensor:
        placements = [
            ItemPlacement.in_chunk([ITEM_TOKENS], offset=offset, chunk_start=0, chunk_end=NUM_TOKENS, first_position=0)
            for offset in self._offsets
        ]
        return build_vision_positions(placements, max_blocks=ITEMS, block_size=ITEM_TOKENS, num_tokens=NUM_TOKENS)

    def cat(self) -> torch.Tensor:
        return torch.cat(self._dense)

    def cat_into_touched(self) -> torch.Tensor:
        return torch.cat(self._dense, out=self._touched)

    def merged_from_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_vision_embeddings(self._hidden_states, self.views(), self.positions())

    def merged_in_a_graph(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._compiled(self._hidden_states, self.views(), self.positions())

    def merged_from_dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In the manner of vLLM's models with deepstack: a mask, and levels beside one another until the end."""
        fat = self.cat()
        merged = self._hidden_states.clone()
        merged[self._is_vision] = fat[:, :HIDDEN]
        levels = fat.new_zeros(NUM_TOKENS, LEVELS * HIDDEN)
        levels[self._is_vision] = fat[:, HIDDEN:]
        return merged, levels.view(NUM_TOKENS, LEVELS, HIDDEN).permute(1, 0, 2)

    def cases(self) -> dict[str, Timed]:
        def case(work: Callable[[], object]) -> Timed:
            def run() -> Stopwatch:
                self._other.copy_(self._another)  # whatever the case before left in the processor's caches
                return timed(work)

            return run

        return {
            CAT: case(self.cat),
            "torch.cat into touched memory": case(self.cat_into_touched),
            "tuple of views": case(self.views),
            "tuple of views, and positions": case(lambda: (self.views(), self.positions())),
            BY_MASK: case(self.merged_from_dense),
            "views, positions, then merge_vision_embeddings": case(self.merged_from_views),
            COMPILED: case(self.merged_in_a_graph),
        }


def test_gather() -> None:
    step = Step()
    cases = step.cases()
    compiled = {case: cases[case] for case in (BY_MASK, COMPILED)}
    # On their own and last: mixed with the others, they made some of those a hundred times slower in some turns.
    samples = by_turns(ROUNDS, {case: work for case, work in cases.items() if case != COMPILED})
    samples_of_compiled = by_turns(ROUNDS, compiled)
    theirs = step.merged_from_dense()
    for ours in (step.merged_from_views(), step.merged_in_a_graph()):
        assert all(map(torch.equal, ours, theirs))
    table = Table(
        "gather",
        "Gathering the embeddings of one prefill step",
        "ms",
        (
            f"{ITEMS} items of {ITEM_TOKENS} tokens, [rows, {FAT_DIM}] {DTYPE}, {LEVELS} deepstack levels: "
            f"{ITEMS * ITEM_TOKENS * FAT_DIM * 2 >> 20} MiB; a batch of {NUM_TOKENS} tokens",
            "views: buffer[block_id], blocks in random order; nothing is copied until the merge stacks them",
            "torch.cat and both merges allocate what they return: the kernel provides and zeroes its pages in the call",
            "merges on the CPU, eager but for the last, which Inductor compiled before; all give the same bits",
        ),
        compared_with=f"{CAT}; merges: {BY_MASK}",
    )
    for case, values in samples.items():
        table.add(case, values, reference=samples[BY_MASK if "merge" in case else CAT])
    table.add(COMPILED, samples_of_compiled[COMPILED], reference=samples_of_compiled[BY_MASK])
    table.publish()
