# SPDX-License-Identifier: Apache-2.0
"""One line now and then that says what the cache has done: for people who read logs before they read metrics.

Formats figures that others have counted; counts nothing itself.
"""

import time
from collections.abc import Callable, Mapping

from vllm.logger import init_logger

__all__ = ["ActivityLog"]

logger = init_logger(f"vllm.{__name__}")


class ActivityLog:
    """Logs the figures when they have changed, at most once per interval. Step thread: one clock read when not due."""

    def __init__(
        self,
        interval_seconds: float,
        figures: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`figures` gives totals since start by name; `clock` monotonic seconds."""
        self._interval = interval_seconds
        self._figures = figures
        self._clock = clock
        self._due = clock() + interval_seconds
        self._last: dict[str, int] = {}

    def log_if_due(self) -> bool:
        """Log one line if the interval is over and something has happened; whether a line was logged."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._interval
        return self.log()

    def log(self) -> bool:
        """Log one line now if something has happened since the last one; whether a line was logged."""
        figures = {name: value for name, value in self._figures().items() if value}
        if figures == self._last:
            return False
        self._last = figures
        logger.info("Encoder cache since start: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))
        return True
