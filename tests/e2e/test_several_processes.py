# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks on one pool, and engines that share nothing but a directory."""

from __future__ import annotations

import pytest

from tests.e2e.scenes import CLIP, Disaggregated, Seen, TensorParallel

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_ranks_share_one_copy_in_memory_and_one_on_disk(tensor_parallel: TensorParallel) -> None:
    assert len(tensor_parallel.segments) == 1
    assert tensor_parallel.files == 6


def test_both_ranks_load_what_was_evicted(tensor_parallel: TensorParallel) -> None:
    assert tensor_parallel.cold.runs == dict.fromkeys(range(6), 1)
    assert tensor_parallel.evicted.runs == {0: 0, 1: 0}
    for rank in (0, 1):
        events = [event for event in tensor_parallel.events if event.rank == rank]
        encoded = [event.digest for event in events if event.kind == "encoded"]
        gathered = [event.digest for event in events if event.kind == "gathered"]
        assert gathered[-2:] == gathered[:2]
        assert len(encoded) == 6


def test_the_consumer_encodes_nothing_that_the_producer_stored(plain: Seen, disaggregated: Disaggregated) -> None:
    assert disaggregated.produced == 4
    assert disaggregated.files == 4
    assert disaggregated.consumed.runs == {0: 0, 1: 0, 2: 0, CLIP: 0}
    assert all(answer.same_as(plain.answers[item]) for item, answer in disaggregated.consumed.answers.items())


def test_a_consumer_encodes_what_nobody_stored_and_stores_nothing(disaggregated: Disaggregated) -> None:
    assert disaggregated.new_to_both.runs == {3: 1}
    assert disaggregated.files_after == 4
