# SPDX-License-Identifier: Apache-2.0
"""The worker hook and the manager that counts blocks, on a real engine whose working set is five times its cache."""

from __future__ import annotations

import pytest

from tests.e2e.scenes import BLOCK_ITEMS, InBlocks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_every_item_is_encoded_once(in_blocks: InBlocks) -> None:
    assert len(in_blocks.answers) == 3 * BLOCK_ITEMS
    assert in_blocks.runs == BLOCK_ITEMS


def test_answers_are_those_without_a_cache(in_blocks: InBlocks) -> None:
    assert all(answer.same_as(in_blocks.plain[item]) for item, answer in in_blocks.answers)


def test_what_the_model_is_given_is_what_the_encoder_made(in_blocks: InBlocks) -> None:
    encoded = {event.digest for event in in_blocks.events if event.kind == "encoded"}
    gathered = [event.digest for event in in_blocks.events if event.kind == "gathered"]
    assert len(encoded) == BLOCK_ITEMS
    assert len(gathered) == len(in_blocks.answers)
    assert set(gathered) == encoded


def test_dirty_items_are_flushed_at_a_stop(in_blocks: InBlocks) -> None:
    assert BLOCK_ITEMS - 4 <= in_blocks.files_before <= BLOCK_ITEMS
    assert in_blocks.files_after == BLOCK_ITEMS


def test_the_cache_lies_in_blocks_and_neither_flag_is_missed(in_blocks: InBlocks) -> None:
    assert "16 blocks of 64 tokens" in in_blocks.log
    assert "no_free_blocks" not in in_blocks.log
    assert "the scheduler counts embeddings" not in in_blocks.log
    assert "the worker keeps plain tensors" not in in_blocks.log
