# SPDX-License-Identifier: Apache-2.0
"""How every benchmark here measures: in turns, with the processor's time beside the clock's.

Other programs run on the same processors. So nothing is compared but what took turns within one run, and every figure
has two clocks: how long it took, and how long the measuring thread itself computed (its system calls included), which
other programs lengthen far less.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Samples", "StallMeter", "Stopwatch", "by_turns", "settle_memory", "stopwatch", "timed"]


@dataclass(slots=True)
class Stopwatch:
    """What one measurement came to."""

    wall: float = 0.0
    """Seconds by the clock."""
    cpu: float | None = None
    """Seconds that the measuring thread computed; None where other threads do the work."""


Timed = Callable[[], Stopwatch]
"""Does the work and says what of it counts."""


@dataclass(slots=True)
class Samples:
    """Repeated measurements of one thing, in the order in which they were taken."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Empty where the measuring thread does not do the work."""

    def add(self, took: Stopwatch, count: int = 1) -> None:
        """Take up a measurement of `count` things of the same kind."""
        self.wall.append(took.wall / count)
        if took.cpu is not None:
            self.cpu.append(took.cpu / count)

    def extend(self, other: "Samples") -> None:
        """Take up all of `other`."""
        self.wall += other.wall
        self.cpu += other.cpu

    def minus(self, other: "Samples") -> "Samples":
        """By how much each was longer than its counterpart."""
        return Samples([ours - theirs for ours, theirs in zip(self.wall, other.wall, strict=True)])


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the block on this thread."""
    watch = Stopwatch()
    computed, started = time.thread_time(), time.perf_counter()
    yield watch
    watch.wall, watch.cpu = time.perf_counter() - started, time.thread_time() - computed


def timed(work: Callable[[], object]) -> Stopwatch:
    """Measure one call on this thread; what it returns is freed within the measurement."""
    computed, started = time.thread_time(), time.perf_counter()
    work()
    wall = time.perf_counter() - started
    return Stopwatch(wall, time.thread_time() - computed)


def by_turns(rounds: int, cases: Mapping[str, Timed], warm_up: int = 2) -> dict[str, Samples]:
    """Run the cases A B C, C B A, A B C, and so on. The first `warm_up` rounds do not count."""
    samples = {case: Samples() for case in cases}
    settle_memory()
    for turn in range(-warm_up, rounds):
        for case in list(cases) if turn % 2 else reversed(list(cases)):
            took = cases[case]()
            if turn >= 0:
                samples[case].add(took)
    return samples


def settle_memory() -> None:
    """Collect garbage, and leave what lives out of later collections, as vLLM does once its engine has started."""
    gc.collect()
    gc.freeze()


class StallMeter:
    """A thread that wants to run every 0.2 ms and notes how much later it did: what a step thread would feel."""

    INTERVAL_SECONDS = 0.0002

    def __init__(self) -> None:
        self.late: list[float] = []
        """Seconds, by turn."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bench-stall")

    def __enter__(self) -> "StallMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()

    @property
    def longest(self) -> Stopwatch:
        return Stopwatch(max(self.late))

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stopping:
            time.sleep(self.INTERVAL_SECONDS)
            now = time.perf_counter()
            self.late.append(now - last - self.INTERVAL_SECONDS)
            last = now
