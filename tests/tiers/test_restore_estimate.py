# SPDX-License-Identifier: Apache-2.0
"""The estimate of a restore: it follows what was observed, and what was observed long ago fades."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_tiers.restore_estimate import HALF_LIFE_SECONDS, WEIGHT, RestoreEstimate

MB = 1 << 20
SECONDS = st.floats(0.0, 1e4)
NBYTES = st.integers(0, 1 << 34)


def test_unknown_tiers_seem_free() -> None:
    assert RestoreEstimate().seconds_for(MB, now=0.0) == 0.0
    assert RestoreEstimate().seconds_for(MB, now=1e9) == 0.0


def test_a_first_observation_is_the_estimate() -> None:
    estimate = RestoreEstimate()
    estimate.observe(0.5, 2.0, MB, now=10.0)
    assert estimate.seconds_for(MB, now=10.0) == pytest.approx(2.5)
    assert estimate.seconds_for(4 * MB, now=10.0) == pytest.approx(8.5)
    assert estimate.seconds_for(0, now=10.0) == pytest.approx(0.5)


def test_later_observations_move_the_mean_by_their_weight() -> None:
    estimate = RestoreEstimate()
    estimate.observe(0.0, 1.0, MB, now=0.0)
    estimate.observe(0.0, 2.0, MB, now=0.0)
    assert estimate.seconds_for(MB, now=0.0) == pytest.approx(1.0 + WEIGHT)


def test_a_first_observation_of_nothing_is_one_too() -> None:
    """Zero is a duration that a coarse clock gives, not a sign that nothing is known."""
    estimate = RestoreEstimate()
    estimate.observe(0.0, 0.0, MB, now=0.0)
    estimate.observe(0.0, 1.0, MB, now=0.0)
    assert estimate.seconds_for(MB, now=0.0) == pytest.approx(WEIGHT)


def test_an_estimate_halves_in_its_half_life() -> None:
    estimate = RestoreEstimate()
    estimate.observe(1.0, 3.0, MB, now=0.0)
    for half_lives in range(5):
        assert estimate.seconds_for(MB, now=half_lives * HALF_LIFE_SECONDS) == pytest.approx(4.0 / 2**half_lives)
    assert estimate.seconds_for(MB, now=1e12) == 0.0


@pytest.mark.parametrize("silence", [10 * HALF_LIFE_SECONDS, 1e5, 1e9])
def test_after_a_long_silence_the_newest_observation_stands_alone(silence: float) -> None:
    """A slow store is found out by one try, not by several: what has faded may not make it look fast."""
    estimate = RestoreEstimate()
    estimate.observe(0.0, 10.0, MB, now=0.0)
    estimate.observe(0.0, 10.0, MB, now=silence)
    assert estimate.seconds_for(MB, now=silence) == pytest.approx(10.0, rel=0.01)


def test_a_store_that_has_become_fast_is_known_to_be_after_a_few_reads() -> None:
    estimate = RestoreEstimate()
    estimate.observe(0.0, 10.0, MB, now=0.0)
    for _ in range(20):
        estimate.observe(0.0, 0.01, MB, now=0.0)
    assert estimate.seconds_for(MB, now=0.0) < 0.05


@given(st.lists(st.tuples(SECONDS, SECONDS, NBYTES, st.floats(0.0, 1e4)), min_size=1, max_size=20), NBYTES)
def test_an_estimate_stays_within_what_was_observed(
    observed: list[tuple[float, float, int, float]], nbytes: int
) -> None:
    estimate = RestoreEstimate()
    now = 0.0
    for probe_seconds, read_seconds, size, pause in observed:
        now += pause
        estimate.observe(probe_seconds, read_seconds, size, now)
    slowest_probe = max(each[0] for each in observed)
    slowest_byte = max(each[1] / max(each[2], 1) for each in observed)
    seconds = estimate.seconds_for(nbytes, now)
    assert math.isfinite(seconds)
    assert 0.0 <= seconds <= (slowest_probe + slowest_byte * nbytes) * (1 + 1e-9)


@given(SECONDS, SECONDS, NBYTES, NBYTES, st.floats(0.0, 1e4))
def test_more_bytes_never_take_less(probe: float, read: float, smaller: int, larger: int, age: float) -> None:
    smaller, larger = sorted((smaller, larger))
    estimate = RestoreEstimate()
    estimate.observe(probe, read, MB, now=0.0)
    assert estimate.seconds_for(smaller, age) <= estimate.seconds_for(larger, age)
