# SPDX-License-Identifier: Apache-2.0
"""One item in the hierarchy's index, and the lease by which somebody holds it.

State only: every change is made by the hierarchy under its lock. No I/O, no thread and no policy may enter.
"""

import enum
from dataclasses import dataclass

from lmcache.v1.memory_management import MemoryObj

from storage_tiers.key import WantedItem
from storage_tiers.tier import ItemHeader

__all__ = ["Entry", "EntryState", "Lease"]


class EntryState(enum.Enum):
    """Where an item's bytes stand as far as the pool is concerned. Without an entry, it is absent or only stored."""

    STAGING = "staging"
    """An I/O thread looks for the bytes below, or reads them."""
    SAVING = "saving"
    """Pool space is reserved; a worker has yet to fill it."""
    RESIDENT = "resident"
    """Verified bytes are in the pool."""
    GONE = "gone"
    """Staging or saving failed, or the bytes were evicted or replaced. Only leases that still stand lead here."""


class Entry:
    """An item that is in the pool or on its way there. Fields change only under the hierarchy's lock."""

    __slots__ = (
        "claims",
        "header",
        "is_restored",
        "last_used",
        "leases",
        "obj",
        "reload_seconds",
        "since",
        "state",
        "stored_below",
        "wanted",
    )

    def __init__(self, wanted: WantedItem, state: EntryState) -> None:
        """A fresh entry, unleased and without memory."""
        self.wanted = wanted
        self.state = state
        self.header: ItemHeader | None = None
        self.obj: MemoryObj | None = None
        """The pool's memory. While `leases` is not 0 the entry holds a reference of its own."""
        self.leases = 0
        """Leases of every kind: the bytes stay while there is one."""
        self.claims = 0
        """Leases of requests, whose bytes are capped together."""
        self.last_used = 0
        """Tick of the hierarchy's use counter."""
        self.since = 0.0
        """Monotonic seconds at which the entry was made: tells a staging that hangs."""
        self.is_restored = False
        """Whether a lower tier has brought the bytes, and nobody has loaded them since."""
        self.stored_below = False
        """Whether every lower tier has taken the same bytes, so that an eviction loses nothing."""
        self.reload_seconds = 0.0
        """Estimate of having the item again after an eviction: a restore where it is stored below, else encoding."""

    @property
    def nbytes(self) -> int:
        """Bytes of payload; 0 while the shape is unknown."""
        return self.header.payload_bytes if self.header is not None else 0

    def serves(self, wanted: WantedItem) -> bool:
        """Whether these are the bytes that `wanted` asks for: all of identity, shape, modality and fingerprint."""
        if self.header is not None:
            return self.header.mismatch(wanted) is None
        return self.wanted == wanted


@dataclass(slots=True, eq=False)
class Lease:
    """A claim on an entry that keeps its bytes from eviction until `TierHierarchy.release`."""

    entry: Entry
    is_claim: bool
    """Whether a request holds it: its bytes then count against the cap on leases."""
    released: bool = False

    @property
    def state(self) -> EntryState:
        """The entry's state at this moment. Any thread."""
        return self.entry.state
