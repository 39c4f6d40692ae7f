# SPDX-License-Identifier: Apache-2.0
"""Whether a restore is worth its wait: what reading from a tier takes, against what encoding takes.

Arithmetic on observed durations only; no tier and no clock of its own may enter.
"""

import threading

__all__ = ["RestoreEstimate"]

WEIGHT = 0.3
"""Share of the newest observation in the running mean; more of it the longer ago the last one was."""
HALF_LIFE_SECONDS = 30.0
"""An estimate halves in this time without observations, so that a store which was slow once is tried again."""


class _FadingMean:
    """A running mean that fades while nothing is observed."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._observed_at = float("-inf")

    def observe(self, value: float, now: float) -> None:
        kept = (1 - WEIGHT) * self._left(now)  # what has faded makes room, it does not pull the mean down
        self._mean = kept * self._mean + (1 - kept) * value
        self._observed_at = now

    def at(self, now: float) -> float:
        return self._mean * self._left(now)

    def _left(self, now: float) -> float:
        age = now - self._observed_at
        return float(0.5 ** (age / HALF_LIFE_SECONDS)) if age < 1e6 else 0.0


class RestoreEstimate:
    """Running means of a tier's latency, with or without a find, and of its seconds per byte."""

    def __init__(self) -> None:
        """Nothing observed: every restore seems free."""
        self._lock = threading.Lock()
        self._seconds_per_probe = _FadingMean()
        self._seconds_per_byte = _FadingMean()

    def observe(self, probe_seconds: float, read_seconds: float, nbytes: int, now: float) -> None:
        """Take up one restore: seconds until its header was there, and for `nbytes` of payload. I/O thread."""
        with self._lock:
            self._seconds_per_probe.observe(probe_seconds, now)
            self._seconds_per_byte.observe(read_seconds / max(nbytes, 1), now)

    def observe_probe(self, seconds: float, now: float) -> None:
        """Take up a probe that found nothing: requests waited for it all the same. I/O thread."""
        with self._lock:
            self._seconds_per_probe.observe(seconds, now)

    def seconds_for(self, nbytes: int, now: float) -> float:
        """Estimated seconds to restore `nbytes`; 0.0 while nothing is known. Any thread, the step thread included."""
        with self._lock:
            return self._seconds_per_probe.at(now) + self._seconds_per_byte.at(now) * nbytes
