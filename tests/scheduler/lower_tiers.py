# SPDX-License-Identifier: Apache-2.0
"""The tier in memory of `tests/tiers`, which outlives the engines of a test and knows which threads called it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage_tiers.tier import ItemHeader
from tests.tiers.memory_tier import Gate, MemoryTier, wait_until


class WatchedTier(MemoryTier):
    """A `LowerTier` in a dictionary; every call but `lists` notes the name of its thread."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__(name)
        self.threads: list[tuple[str, str]] = []
        """Operation and thread of each call, in order."""

    @contextmanager
    def held(self, *operations: str) -> Iterator[list[Gate]]:
        """Calls of these operations wait until the body has ended."""
        gates = [self.hold(operation) for operation in operations]
        try:
            yield gates
        finally:
            self._gates = {name: gate for name, gate in self._gates.items() if gate not in gates}
            for gate in gates:
                gate.open()

    def names(self) -> set[str]:
        """Identifiers of what is stored."""
        return {header.mm_hash for header, _ in self.items.values()}

    def header_of(self, mm_hash: str) -> ItemHeader:
        return next(header for header, _ in self.items.values() if header.mm_hash == mm_hash)

    def wait_stored(self, mm_hash: str) -> None:
        wait_until(lambda: mm_hash in self.names(), f"{mm_hash} is stored")

    def _enter(self, operation: str) -> None:
        self.threads.append((operation, threading.current_thread().name))
        super()._enter(operation)
