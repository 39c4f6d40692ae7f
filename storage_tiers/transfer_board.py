# SPDX-License-Identifier: Apache-2.0
"""The board on which workers report: one status byte per transfer and rank, plan numbers and gauges.

Lies at the head of the shared segment, so a report needs no message, no socket and no hook. Nothing may enter that
waits, decides or keeps a second copy of what is on the board.

Every value is one aligned store by one writer, so no reader sees part of it. Order between memory locations: a worker
writes the bytes of an item, then its status, and the scheduler must not see them the other way round. On x86 stores
become visible in program order and loads are done in it; glibc ends its streaming copies with a store fence. Elsewhere
(Graviton) the processor promises nothing, so `_fence` takes and releases a lock twice on either side: a release
followed by an acquire is a full barrier on ARMv8. Copies made by a device must be complete, as its stream tells, before
the status is written; those of other threads are ordered by whatever the worker waits for them with.
"""

import platform
import threading
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "BlockCounts",
    "RankGauge",
    "RankView",
    "SlotPool",
    "TransferBoard",
    "TransferStatus",
    "pack_blocks",
    "unpack_blocks",
]

ALIGN_BYTES = 4096
CACHE_LINE_BYTES = 64
RANK_BYTES = 256
"""One rank's fixed part: attach byte (padded to 8), plan number u64, then float64 gauges. Its own cache lines."""
GAUGES_AT = 16
MAX_GAUGES = (RANK_BYTES - GAUGES_AT) // 8
_BLOCKS_LIMIT = 1 << 26
"""Two counts below it fit the 53 bits of a float64's integers."""
MAX_RANKS = 1024
MAX_SLOTS = 1 << 20

_STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")


class TransferStatus(IntEnum):
    """What a rank has said about one transfer."""

    EMPTY = 0
    """Nothing yet."""
    DEFERRED = 1
    """Accepted, waits in the worker's queue: another status follows, in this plan or a later one."""
    DONE = 2
    """All bytes are in place."""
    FAILED = 3
    """Not carried out, or not to the end: the destination holds rubbish."""


class RankGauge(IntEnum):
    """What a rank tells of itself; the number is the place on the board. Room for `MAX_GAUGES`."""

    ENCODE_SECONDS_PER_TOKEN = 0
    SAVE_QUEUE_BYTES = 1
    SAVED_BYTES = 2
    LOADED_BYTES = 3
    SAVE_FAILURES = 4
    LOAD_FAILURES = 5
    SAVE_SECONDS = 6
    LOAD_SECONDS = 7
    DEVICE_BLOCKS = 8
    """What items own and what is held, by `pack_blocks` in one store: read together, they were true together."""
    DEVICE_BLOCKS_TOTAL = 9
    """Blocks that can hold items; 0 without blocks."""
    DEVICE_REAL_TOKENS = 10
    EVICTED_BLOCKS = 11


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Device blocks that items own, and blocks of freed items that are still read."""

    active: int
    held: int


def pack_blocks(active: int, held: int) -> float:
    """Both counts in one float64, for one store. Raises ValueError from 2**26 blocks on."""
    if max(active, held) >= _BLOCKS_LIMIT:
        raise ValueError(f"{active} active and {held} held blocks do not fit one gauge")
    return float(active + held * _BLOCKS_LIMIT)


def unpack_blocks(packed: float) -> BlockCounts:
    """What `pack_blocks` made."""
    held, active = divmod(int(packed), _BLOCKS_LIMIT)
    return BlockCounts(active, held)


class TransferBoard:
    """The board as the scheduler reads it; `rank(r)` gives a worker's view of it."""

    def __init__(self, memory: memoryview, num_ranks: int, num_slots: int) -> None:
        """Lay a board over `memory` (8-byte aligned, zeroed when new) of at least `nbytes_for(...)` bytes.

        Raises ValueError where the memory is too small, read-only, or already carries a board of another size.
        """
        needed = self.nbytes_for(num_ranks, num_slots)
        flat = memory.cast("B")
        if flat.readonly or len(flat) < needed:
            raise ValueError(f"a board of {num_ranks} ranks and {num_slots} slots needs {needed} writable bytes")
        self._words = flat[: needed // 8 * 8].cast("Q")
        if self._words[0] == 0:
            self._words[1] = num_slots
            self._words[0] = num_ranks  # last: `attach` takes a board with a rank count to be laid out
        if (self._words[0], self._words[1]) != (num_ranks, num_slots):
            raise ValueError(f"the memory carries a board of {self._words[0]} ranks and {self._words[1]} slots")
        self.num_ranks = num_ranks
        self.num_slots = num_slots
        self._bytes = flat
        self._gauges = flat[: needed // 8 * 8].cast("d")
        self._statuses_at = CACHE_LINE_BYTES + num_ranks * RANK_BYTES
        self._stride = _round_up(num_slots, CACHE_LINE_BYTES)
        self._statuses_end = self._statuses_at + num_ranks * self._stride

    @classmethod
    def attach(cls, memory: memoryview) -> "TransferBoard":
        """The board that another process has laid over the same memory, sizes as written there.

        Raises ValueError when there is none yet, or when it does not fit into `memory`.
        """
        flat = memory.cast("B")
        num_ranks = int.from_bytes(flat[:8], "little")
        num_slots = int.from_bytes(flat[8:16], "little")
        if num_ranks == 0:
            raise ValueError("the memory carries no board yet")
        return cls(memory, num_ranks, num_slots)

    @staticmethod
    def nbytes_for(num_ranks: int, num_slots: int) -> int:
        """Bytes that a board takes: a multiple of 4096. Raises ValueError for sizes outside of what is sane."""
        if not (0 < num_ranks <= MAX_RANKS and 0 < num_slots <= MAX_SLOTS):
            raise ValueError(f"no board has {num_ranks} ranks and {num_slots} slots")
        per_rank = RANK_BYTES + _round_up(num_slots, CACHE_LINE_BYTES)
        return _round_up(CACHE_LINE_BYTES + num_ranks * per_rank, ALIGN_BYTES)

    def rank(self, rank: int) -> "RankView":
        """The view that rank number `rank` writes through. Raises IndexError when there is no such rank."""
        self._check_rank(rank)
        return RankView(self, rank)

    def status(self, slot: int, rank: int) -> TransferStatus:
        """What `rank` has said about the transfer in `slot`. Raises IndexError when there is no such slot or rank."""
        self._check_rank(rank)
        self._check_slot(slot)
        status = TransferStatus(self._bytes[self._statuses_at + rank * self._stride + slot])
        _fence()
        return status

    def statuses(self, slot: int) -> tuple[TransferStatus, ...]:
        """What every rank has said about the transfer in `slot`, by rank. Raises IndexError."""
        self._check_slot(slot)
        column = self._bytes[self._statuses_at + slot : self._statuses_end : self._stride]
        statuses = tuple(map(TransferStatus, column))
        _fence()
        return statuses

    def clear_slot(self, slot: int) -> None:
        """Set every rank's status of `slot` to EMPTY: before its number goes into a plan. Raises IndexError."""
        self._check_slot(slot)
        for at in range(self._statuses_at + slot, self._statuses_end, self._stride):
            self._bytes[at] = TransferStatus.EMPTY

    def completed_plan(self, rank: int) -> int:
        """Number of the last plan that `rank` has carried out; 0 before the first. Raises IndexError.

        Read it before the statuses: what has no status then, in a plan at or below that number, will get none.
        """
        self._check_rank(rank)
        number = self._words[self._word_of(rank) + 1]
        _fence()
        return number

    def attached(self) -> bool:
        """Whether every rank has mapped the segment. Any thread; a few byte reads."""
        first, end = CACHE_LINE_BYTES, CACHE_LINE_BYTES + self.num_ranks * RANK_BYTES
        return all(self._bytes[first:end:RANK_BYTES])

    def gauge(self, rank: int, which: RankGauge) -> float:
        """The last value of a gauge of `rank`; 0.0 before the first. Raises IndexError."""
        self._check_rank(rank)
        return self._gauges[self._word_of(rank) + GAUGES_AT // 8 + which]

    def _word_of(self, rank: int) -> int:
        """Index of the rank's fixed part in 8-byte words."""
        return (CACHE_LINE_BYTES + rank * RANK_BYTES) // 8

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} is none of the board's {self.num_ranks}")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is none of the board's {self.num_slots}")


class RankView:
    """What one rank writes. Each byte and number has one writer: threads of a rank must share none of them."""

    def __init__(self, board: TransferBoard, rank: int) -> None:
        """Made by `TransferBoard.rank`, which checks the number."""
        self.rank = rank
        self._board = board

    def attach(self) -> None:
        """Say that this rank has mapped the segment and can copy."""
        self._board._bytes[CACHE_LINE_BYTES + self.rank * RANK_BYTES] = 1

    def set_status(self, slot: int, status: TransferStatus) -> None:
        """Report on the transfer in `slot`, after all of its bytes are in place. Any thread. Raises IndexError."""
        board = self._board
        board._check_slot(slot)
        _fence()
        board._bytes[board._statuses_at + self.rank * board._stride + slot] = status

    def complete_plan(self, number: int) -> None:
        """Say that plan `number` has been carried out: every transfer in it has a status, or will have none.

        Raises ValueError when it is below the last one, OverflowError when it is no u64.
        """
        word = self._board._word_of(self.rank) + 1
        last = self._board._words[word]
        if number < last:
            raise ValueError(f"plan {number} completes after plan {last}")
        if number >= 1 << 64:
            raise OverflowError(f"plan number {number} does not fit the board")
        _fence()
        self._board._words[word] = number

    def set_gauge(self, which: RankGauge, value: float) -> None:
        """Publish a gauge: bytes, seconds, or a count since start. Any thread."""
        self._board._gauges[self._board._word_of(self.rank) + GAUGES_AT // 8 + which] = value


class SlotPool:
    """The board's slots that no transfer uses. Scheduler only; the caller holds one lock around every call."""

    def __init__(self, num_slots: int) -> None:
        """All of `num_slots` start free."""
        self._free = deque(range(num_slots))
        self._taken = bytearray(num_slots)

    def acquire(self) -> int | None:
        """The slot that has been free the longest, or None when all are in use. O(1)."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Give `slot` back. Raises ValueError when it is not in use."""
        if not 0 <= slot < len(self._taken) or not self._taken[slot]:
            raise ValueError(f"slot {slot} is not in use")
        self._taken[slot] = 0
        self._free.append(slot)

    @property
    def num_free(self) -> int:
        """How many more transfers can be outstanding."""
        return len(self._free)


_fence_lock = threading.Lock()


def _fence() -> None:
    """Order the memory accesses of this thread where the processor does not: see the module's text."""
    if _STRONGLY_ORDERED:
        return
    for _ in range(2):
        with _fence_lock:
            pass


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
