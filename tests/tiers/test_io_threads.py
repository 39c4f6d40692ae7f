# SPDX-License-Identifier: Apache-2.0
"""The I/O threads: what runs before what, what is refused, and that they end."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from storage_tiers.faults import FaultLog
from storage_tiers.io_threads import IoThreads
from tests.tiers.memory_tier import DEADLINE_SECONDS, Gate, wait_until

MakeThreads = Callable[..., IoThreads]


@pytest.fixture
def faults() -> FaultLog:
    return FaultLog()


@pytest.fixture
def gates() -> Iterator[Callable[[], Gate]]:
    """Makes gates and opens them all at the end, so that no thread outlives its test."""
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        return made[-1]

    yield make
    for gate in made:
        gate.open()


@pytest.fixture
def make_threads(faults: FaultLog, gates: Callable[[], Gate]) -> Iterator[MakeThreads]:
    made: list[IoThreads] = []

    def make(num_threads: int = 2, max_queued_reads: int = 100) -> IoThreads:
        made.append(IoThreads(num_threads, max_queued_reads, faults))
        return made[-1]

    yield make
    for io in made:
        io.close(0.0)


def run_read(io: IoThreads) -> None:
    """A read runs now, whatever else hangs."""
    done = threading.Event()
    assert io.submit_read(done.set)
    assert done.wait(DEADLINE_SECONDS), "a read does not run"


def num_waiting(io: IoThreads) -> int:
    return sum(len(condition._waiters) for condition in vars(io).values() if isinstance(condition, threading.Condition))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_writes_never_hold_the_last_thread(
    make_threads: MakeThreads, gates: Callable[[], Gate], num_threads: int
) -> None:
    io = make_threads(num_threads)
    gate = gates()
    for _ in range(20):
        assert io.submit_write(gate.pass_through)
    gate.wait_arrived(max(1, num_threads - 1))
    run_read(io)
    run_read(io)
    assert gate.arrived == max(1, num_threads - 1)
    assert io.pending_writes == 20
    gate.open()
    assert io.drain_writes(DEADLINE_SECONDS)
    assert io.pending_writes == 0


def test_reads_that_wait_go_before_writes_that_waited_longer(
    make_threads: MakeThreads, gates: Callable[[], Gate]
) -> None:
    io = make_threads(2)
    busy = [gates(), gates()]
    for gate in busy:
        io.submit_read(gate.pass_through)
        gate.wait_arrived()
    order: list[str] = []
    for name in ("write 1", "write 2"):
        io.submit_write(partial(order.append, name))
    for name in ("read 1", "read 2"):
        io.submit_read(partial(order.append, name))
    busy[0].open()
    assert io.drain_writes(DEADLINE_SECONDS)
    assert order == ["read 1", "read 2", "write 1", "write 2"]


def test_reads_use_every_thread(make_threads: MakeThreads, gates: Callable[[], Gate]) -> None:
    io = make_threads(4)
    gate = gates()
    for _ in range(4):
        io.submit_read(gate.pass_through)
    gate.wait_arrived(4)


def test_a_full_queue_refuses_reads_and_takes_writes(make_threads: MakeThreads, gates: Callable[[], Gate]) -> None:
    io = make_threads(2, max_queued_reads=3)
    gate = gates()
    for number in range(2):
        assert io.submit_read(gate.pass_through)
        gate.wait_arrived(number + 1)
    assert [io.submit_read(gate.pass_through) for _ in range(4)] == [True, True, True, False]
    assert io.queued_reads == 3
    assert io.submit_write(gate.pass_through)
    gate.open()
    assert io.drain_writes(DEADLINE_SECONDS)
    run_read(io)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_job_that_raises_is_counted_and_costs_no_thread(
    make_threads: MakeThreads, faults: FaultLog, kind: str
) -> None:
    def fail() -> None:
        raise RuntimeError("a job's own guard has failed")

    io = make_threads(2)
    for _ in range(10):
        assert io.submit_read(fail) if kind == "read" else io.submit_write(fail)
    wait_until(lambda: faults.count("hierarchy", "io_job_failed") == 10, "all have failed")
    assert io.drain_writes(DEADLINE_SECONDS)
    run_read(io)
    assert io.pending_writes == 0


def test_draining_ends_when_the_time_is_up(make_threads: MakeThreads, gates: Callable[[], Gate]) -> None:
    io = make_threads()
    gate = gates()
    io.submit_write(gate.pass_through)
    assert not io.drain_writes(0.0)
    gate.wait_arrived()
    assert not io.drain_writes(0.0)
    gate.open()
    assert io.drain_writes(DEADLINE_SECONDS)


def test_draining_takes_no_wake_up_from_a_read(make_threads: MakeThreads, gates: Callable[[], Gate]) -> None:
    """One job wakes one waiter, which must be a thread, whoever else waits and since when."""
    io = make_threads(2)
    gate = gates()
    io.submit_write(gate.pass_through)
    gate.wait_arrived()
    drain = threading.Thread(target=io.drain_writes, args=(DEADLINE_SECONDS,))
    drain.start()
    for _ in range(4):
        wait_until(lambda: num_waiting(io) == 2, "the idle thread and the drain wait")
        run_read(io)
        wait_until(lambda: num_waiting(io) == 2, "both wait again")
        with io._changed:
            io._changed._waiters.rotate()  # whichever came first
    gate.open()
    drain.join(DEADLINE_SECONDS)
    assert not drain.is_alive()


def test_an_idle_thread_keeps_nothing_of_its_last_job_alive(make_threads: MakeThreads) -> None:
    """A job holds an entry, and an entry memory: that must not wait for the thread's next job."""

    class Job:
        def __call__(self) -> None:
            pass

    io = make_threads(2)
    jobs = [Job() for _ in range(20)]
    gone = [weakref.ref(job) for job in jobs]
    while jobs:
        io.submit_write(jobs.pop())
    assert io.drain_writes(DEADLINE_SECONDS)
    wait_until(lambda: num_waiting(io) == 2, "both threads idle")
    assert [ref() for ref in gone] == [None] * 20


def test_close_drops_what_is_queued_and_joins(make_threads: MakeThreads, gates: Callable[[], Gate]) -> None:
    io = make_threads(2)
    gate = gates()
    ran: list[str] = []
    for number in range(2):
        io.submit_read(gate.pass_through)
        gate.wait_arrived(number + 1)
    io.submit_read(partial(ran.append, "read"))
    io.submit_write(partial(ran.append, "write"))
    assert not io.close(0.0), "two threads hang"
    assert io.queued_reads == io.pending_writes == 0
    gate.open()
    assert io.close(DEADLINE_SECONDS)
    assert ran == []


def test_after_close_jobs_are_refused(make_threads: MakeThreads) -> None:
    io = make_threads()
    assert io.close(DEADLINE_SECONDS)
    assert not io.submit_read(lambda: None)
    assert not io.submit_write(lambda: None)
    assert io.drain_writes(0.0)
    assert io.close(DEADLINE_SECONDS)


def test_close_waits_once_however_many_threads_hang(
    make_threads: MakeThreads, gates: Callable[[], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    io = make_threads(8)
    gate = gates()
    for _ in range(8):
        io.submit_read(gate.pass_through)
    gate.wait_arrived(8)
    waits: list[float] = []
    join = threading.Thread.join

    def noting(thread: threading.Thread, timeout: float | None = None) -> None:
        assert timeout is not None
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noting)
    assert not io.close(0.05)
    assert sum(waits[1:]) < 0.05


def test_every_job_runs_exactly_once(make_threads: MakeThreads) -> None:
    io = make_threads(4, max_queued_reads=10_000)
    ran: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def job(submitter: int, number: int) -> None:
        with lock:
            ran[submitter, number] += 1

    def submit(submitter: int) -> None:
        for number in range(300):
            put = io.submit_read if (number + submitter) % 2 else io.submit_write
            assert put(partial(job, submitter, number))

    submitters = [threading.Thread(target=submit, args=(submitter,)) for submitter in range(4)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    assert io.drain_writes(DEADLINE_SECONDS)
    wait_until(lambda: len(ran) == 1200, "all have run")
    assert set(ran.values()) == {1}
