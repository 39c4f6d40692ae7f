# SPDX-License-Identifier: Apache-2.0
"""Faults: counted by tier and kind, logged once per kind per interval.

Whatever turns a storage fault into a miss reports it here, so nothing is swallowed unseen. No decision is taken in this
room and no other module of ours may enter it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

from lmcache.logging import init_logger

__all__ = ["FaultLog"]

logger = init_logger(__name__)


class FaultLog:
    """Counts faults by `(tier, kind)` and logs each kind at most once per interval, with how many were held back."""

    def __init__(self, interval_seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_seconds`: the least time between two log lines of one kind."""
        self._interval = interval_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last_logged: dict[tuple[str, str], tuple[float, int]] = {}

    def report(self, tier: str, kind: str, detail: object = "") -> None:
        """Count one fault of `kind` at `tier`; log it with `detail` (key, path, error) unless one was logged lately.

        Never raises. Any thread, also the step thread: one dict update, seldom a log line.
        """
        now = self._clock()
        text = str(detail)  # an exception that a log record holds would keep its frames, and their buffers, alive
        with self._lock:
            self._counts[tier, kind] += 1
            count = self._counts[tier, kind]
            logged_at, logged_count = self._last_logged.get((tier, kind), (float("-inf"), 0))
            if now - logged_at < self._interval:
                return
            self._last_logged[tier, kind] = (now, count)
        logger.warning("%s: %s (%d since the last such line): %s", tier, kind, count - logged_count, text)

    def counts(self) -> dict[tuple[str, str], int]:
        """A copy of all counts since start, by `(tier, kind)`. Any thread."""
        with self._lock:
            return dict(self._counts)

    def count(self, tier: str, kind: str) -> int:
        """How many faults of `kind` `tier` has reported since start. Any thread."""
        with self._lock:
            return self._counts[tier, kind]
