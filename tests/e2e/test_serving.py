# SPDX-License-Identifier: Apache-2.0
"""One engine: cold, repeated, evicted, killed, damaged, started again, with a slow disk."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.e2e.scenes import CLIP, ITEMS, Restarted, Seen
from tests.engine.server import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_cold_every_item_is_encoded_once(restarted: Restarted) -> None:
    assert restarted.cold.runs == dict.fromkeys(range(ITEMS + 1), 1)


def test_answers_and_log_probabilities_are_those_without_a_connector(plain: Seen, restarted: Restarted) -> None:
    assert plain.runs == dict.fromkeys(range(ITEMS + 1), 1)
    for seen in (restarted.cold, restarted.device_hit, restarted.evicted, restarted.restarted, restarted.damaged):
        assert all(answer.same_as(plain.answers[item]) for item, answer in seen.answers.items())


def test_what_the_device_holds_is_not_encoded_again(restarted: Restarted) -> None:
    assert restarted.device_hit.runs == {CLIP: 0}


def test_what_left_the_device_is_restored(restarted: Restarted) -> None:
    assert restarted.evicted.runs == {0: 0, 1: 0, 2: 0}


def test_a_restored_tensor_equals_the_encoders_output_bit_for_bit(restarted: Restarted) -> None:
    encoded = [event.digest for event in restarted.events if event.kind == "encoded"]
    gathered = [event.digest for event in restarted.events if event.kind == "gathered"]
    assert len(encoded) == ITEMS + 1
    assert gathered == [*encoded, *encoded[:3]]  # a device hit is the tensor that was seen before, and no new event


def test_after_a_kill_nothing_stored_is_encoded_again_from_the_first_request_on(restarted: Restarted) -> None:
    assert restarted.files == ITEMS + 1
    assert restarted.restarted.runs == {3: 0, 4: 0, 5: 0, CLIP: 0}


def test_a_damaged_file_is_a_miss_and_is_stored_anew(restarted: Restarted) -> None:
    assert restarted.damaged.runs == {0: 1, 1: 1, 2: 1}
    assert restarted.after_damage.runs == {0: 0, 1: 0, 2: 0}


def test_the_segment_of_a_killed_engine_is_removed_by_the_next(restarted: Restarted) -> None:
    assert len(restarted.owned) == 1
    assert restarted.still_in_shm == set()


def test_a_request_that_waits_for_a_slow_disk_is_restored_and_holds_up_nobody(restarted: Restarted) -> None:
    slow = restarted.slow
    assert slow.waited_runs == 0
    assert slow.waited.ttft_s >= slow.read_seconds
    assert slow.beside_ttft_s
    figures = {
        "ttft_alone_s": statistics.median(slow.alone_ttft_s),
        "ttft_beside_s": statistics.median(slow.beside_ttft_s),
        "ttft_of_the_request_that_waited_s": slow.waited.ttft_s,
    }
    (ROOT / "build" / "slow_disk.json").write_text(json.dumps(figures, indent=1))


def test_after_the_deadline_the_item_is_encoded(plain: Seen, restarted: Restarted) -> None:
    assert restarted.slow.late_runs == 1
    assert restarted.slow.late.same_as(plain.answers[7])


def test_the_log_says_what_was_stored_and_where_settings_came_from(restarted: Restarted) -> None:
    assert restarted.first_log.count("EC put: stored ") == ITEMS + 1
    assert "max_local_cpu_size" in restarted.first_log
    assert "EC put: stored " in restarted.second_log  # of what had been damaged
    assert "Encoder cache since start: " in restarted.second_log
