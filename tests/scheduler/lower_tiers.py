# SPDX-License-Identifier: Apache-2.0
"""A tier below the pool that lives in memory: it can be held at any call, and says which threads called it."""

import threading

from storage_tiers.key import WantedItem
from storage_tiers.tier import ItemHeader, digest_of

PATIENCE_SECONDS = 20.0
"""How long a test waits for what must come; only a failing test waits this long."""


class Gate:
    """A door that calls pass through: open at first; while it is shut they wait, and can be waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._waiting = 0

    def shut(self) -> None:
        with self._changed:
            self._open = False

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_for_callers(self, count: int = 1) -> None:
        """Wait until that many calls stand before the door."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting >= count, PATIENCE_SECONDS), "nobody came"

    def __call__(self) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open, PATIENCE_SECONDS)
            self._waiting -= 1


class HeldTier:
    """A `LowerTier` over a dictionary, which outlives its engines: `close` keeps what is stored."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.items: dict[int, tuple[ItemHeader, bytes]] = {}
        self.calls: list[tuple[str, str]] = []
        """Name of the call and of the thread that made it, but for `lists`."""
        self.probing, self.reading, self.writing = Gate(), Gate(), Gate()
        self.fails_with: OSError | None = None
        self._stored = threading.Condition()

    def wait_stored(self, mm_hash: str) -> ItemHeader:
        """Wait until the item is stored; its header."""
        with self._stored:
            found = self._stored.wait_for(lambda: self._header(mm_hash), PATIENCE_SECONDS)
        assert found is not None, f"{mm_hash} was never stored"
        return found

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def names(self) -> set[str]:
        return {header.mm_hash for header, _ in self.items.values()}

    def open_all(self) -> None:
        for gate in (self.probing, self.reading, self.writing):
            gate.open()

    # -- The protocol -----------------------------------------------------------------------------------------------

    def lists(self, chunk_hash: int) -> bool:
        return chunk_hash in self.items

    def probe(self, wanted: WantedItem) -> ItemHeader | None:
        self._called("probe", self.probing)
        stored = self.items.get(wanted.chunk_hash)
        return stored[0] if stored is not None and stored[0].mismatch(wanted) is None else None

    def read_into(self, header: ItemHeader, payload: memoryview) -> bool:
        self._called("read_into", self.reading)
        stored = self.items.get(header.chunk_hash)
        if stored is None or stored[0] != header:
            return False
        payload[:] = stored[1]
        return digest_of(payload) == header.digest

    def write(self, header: ItemHeader, payload: memoryview) -> bool:
        self._called("write", self.writing)
        with self._stored:
            self.items[header.chunk_hash] = (header, bytes(payload))
            self._stored.notify_all()
        return True

    def remove(self, mm_hash: str) -> bool:
        header = self._header(mm_hash)
        return header is not None and self.items.pop(header.chunk_hash, None) is not None

    def close(self) -> None:
        self.open_all()

    def _called(self, call: str, gate: Gate) -> None:
        self.calls.append((call, threading.current_thread().name))
        gate()
        if self.fails_with is not None:
            raise self.fails_with

    def _header(self, mm_hash: str) -> ItemHeader | None:
        return next((header for header, _ in self.items.values() if header.mm_hash == mm_hash), None)
