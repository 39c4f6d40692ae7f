# SPDX-License-Identifier: Apache-2.0
"""Calls to the tiers below the pool, with every failure of a store turned into a miss and counted.

Runs on I/O threads. Knows neither the index nor the pool: headers and buffers come in, answers go out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage_tiers.faults import FaultLog
from storage_tiers.key import WantedItem
from storage_tiers.restore_estimate import RestoreEstimate
from storage_tiers.tier import ItemHeader, LowerTier, Usage

__all__ = ["Found", "LowerTiers"]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a wanted item is, and how long it took to find out."""

    tier: LowerTier
    header: ItemHeader
    probe_seconds: float


class LowerTiers:
    """The tiers below the pool in the order in which they are asked: nearest first."""

    def __init__(self, tiers: Sequence[LowerTier], faults: FaultLog, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._tiers = tuple(tiers)
        self._faults = faults
        self._clock = clock
        self._estimates = {tier.name: RestoreEstimate() for tier in tiers}

    def __bool__(self) -> bool:
        """Whether there is any tier below the pool."""
        return bool(self._tiers)

    def lists(self, chunk_hash: int) -> bool:
        """Whether some tier's in-memory index has that name. Step thread allowed."""
        return any(tier.lists(chunk_hash) for tier in self._tiers)

    def usage(self) -> dict[str, Usage]:
        """How full each tier is, by its name. Step thread allowed."""
        return {tier.name: tier.usage() for tier in self._tiers}

    def seconds_to_restore(self, chunk_hash: int, nbytes: int) -> float:
        """Estimated seconds to restore `nbytes` from the nearest tier that lists the item. Step thread allowed."""
        listing = [tier for tier in self._tiers if tier.lists(chunk_hash)] or list(self._tiers[:1])
        return self._estimates[listing[0].name].seconds_for(nbytes, self._clock()) if listing else 0.0

    def find(self, wanted: WantedItem) -> Found | None:
        """Ask each tier in turn for the header of `wanted`. Never raises OSError."""
        for tier in self._tiers:
            started = self._clock()
            try:
                header = tier.probe(wanted)
            except OSError as error:
                self._faults.report(tier.name, "probe_failed", f"{wanted.mm_hash}: {error}")
                continue
            seconds = self._clock() - started
            if header is not None:
                return Found(tier, header, seconds)
            self._estimates[tier.name].observe_probe(seconds, self._clock())
        return None

    def read(self, found: Found, payload: memoryview) -> bool:
        """Read and verify what `find` found. False leaves rubbish in `payload`. Never raises OSError."""
        started = self._clock()
        try:
            intact = found.tier.read_into(found.header, payload)
        except OSError as error:
            self._faults.report(found.tier.name, "read_failed", f"{found.header.mm_hash}: {error}")
            intact = False
        ended = self._clock()
        self._estimates[found.tier.name].observe(found.probe_seconds, ended - started, len(payload), ended)
        return intact

    def write(self, header: ItemHeader, payload: memoryview) -> bool:
        """Store an item in every tier that does not have it yet. True if all have it now. Never raises OSError."""
        wanted = header.as_wanted()
        stored = True
        for tier in self._tiers:
            try:
                stored &= self._has_same(tier, wanted, header) or tier.write(header, payload)
            except OSError as error:
                self._faults.report(tier.name, "write_failed", f"{header.mm_hash}: {error}")
                stored = False
        return stored

    def touch(self, chunk_hashes: Iterable[int]) -> None:
        """Tell every tier that lists one of the items that it was used."""
        for chunk_hash in chunk_hashes:
            for tier in self._tiers:
                if tier.lists(chunk_hash):
                    tier.touch(chunk_hash)

    def close(self) -> None:
        """Close every tier. What is stored stays. Never raises OSError."""
        for tier in self._tiers:
            try:
                tier.close()
            except OSError as error:
                self._faults.report(tier.name, "close_failed", error)

    def _has_same(self, tier: LowerTier, wanted: WantedItem, header: ItemHeader) -> bool:
        """Whether `tier` holds these very bytes. What it cannot read counts as other bytes: writing replaces it."""
        try:
            present = tier.probe(wanted) if tier.lists(wanted.chunk_hash) else None
        except OSError as error:
            self._faults.report(tier.name, "probe_failed", f"{header.mm_hash}: {error}")
            return False
        return present is not None and present.digest == header.digest
