# SPDX-License-Identifier: Apache-2.0
"""The disk tier as our hierarchy sees it: items that are asked for by what they must be.

This room compares what is stored with what is wanted and gives items their file names. Files, damage and budget are
`disk_store.py`'s; LMCache's view of the same directory is `persistent_disk.py`'s.

What it counts besides the store's faults: other_item (a collision of the 64-bit name), other_fingerprint,
other_num_tokens, other_modality, other_width, other_model, other_dtype. Those are misses; the file stays until the next
save replaces it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from storage_tiers.disk_store import DiskStore
from storage_tiers.faults import FaultLog
from storage_tiers.key import KeySpace, WantedItem, chunk_hash_of
from storage_tiers.tier import ItemHeader, Usage

__all__ = ["DiskTier"]


class DiskTier:
    """A `LowerTier` over a directory that other processes and deployments may share."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        key_space: KeySpace,
        faults: FaultLog,
        *,
        direct_io: bool = False,
        accept_unverified: bool = False,
    ) -> None:
        """Open or create `directory` (0700) and start to look through it in the background; returns in milliseconds.

        `capacity_bytes` is for the whole directory. `accept_unverified` also serves what names no item: LMCache's own
        files, whose size must be exactly that of the wanted rows, columns and dtype, and what was put through LMCache's
        interface. Raises NotADirectoryError where the path is a file, OSError where it cannot be used, ValueError for
        a capacity that is not positive.
        """
        self.store = DiskStore(directory, capacity_bytes, faults, label=self.name, direct_io=direct_io)
        """The files, for administration: entries, check, evict, used_bytes."""
        self._keys = key_space
        self._faults = faults
        self._accept_unverified = accept_unverified

    def usage(self) -> Usage:
        """How full the directory is, as far as this process has seen it."""
        return Usage(self.store.num_entries, self.store.used_bytes, self.store.capacity_bytes)

    def lists(self, chunk_hash: int) -> bool:
        """Whether the index has an entry of that name. False means unknown. A dict look-up: step thread allowed."""
        return self.store.lists(self._keys.file_name_of(chunk_hash))

    def probe(self, wanted: WantedItem) -> ItemHeader | None:
        """The header of the stored item if it is what is `wanted`, found by its file name even during the first scan.

        A header of an item that was accepted unverified bears the wanted names: an empty `fingerprint` tells it, and an
        empty `digest` that nothing can verify its bytes. Raises OSError.
        """
        foreign = partial(self._foreign_header, wanted) if self._accept_unverified else None
        header = self.store.header(self._file_name(wanted.mm_hash), foreign)
        if header is None:
            return None
        why = self._mismatch(header, wanted)
        if why is not None:
            self._faults.report(self.name, why, wanted.mm_hash)
            return None
        return replace(header, mm_hash=wanted.mm_hash, modality=wanted.modality)

    def read_into(self, header: ItemHeader, payload: memoryview) -> bool:
        """Read what `probe` found into `payload` (exactly `payload_bytes` long) and verify its digest.

        False: it has vanished, was replaced, or is damaged and has been removed. Raises OSError; ValueError for a
        payload of another length.
        """
        return self.store.read_into(self._file_name(header.mm_hash), header, _checked(header, payload))

    def write(self, header: ItemHeader, payload: memoryview) -> bool:
        """Store `payload` (exactly `payload_bytes` long, its digest in `header`), replacing an older entry of the name.

        True once another process can read it; False, and counted, when it can never be stored. Raises OSError (ENOSPC
        when even eviction makes no room); ValueError for a payload of another length or an item of another key space.
        """
        if not header.mm_hash or header.model != self._keys.key_model_name or header.dtype != self._keys.dtype:
            raise ValueError(f"item {header.mm_hash!r} of {header.model} {header.dtype} is none of {self._keys}")
        return self.store.write(self._file_name(header.mm_hash), header, _checked(header, payload))

    def remove(self, mm_hash: str) -> bool:
        """Remove an entry; False when there was none, or another item has its 64-bit name. Raises OSError."""
        name = self._file_name(mm_hash)
        header = self.store.header(name, lambda size: None)
        return (header is None or header.mm_hash in ("", mm_hash)) and self.store.remove(name)

    def touch(self, chunk_hash: int) -> None:
        """Note that an item was used without being read here: what is hot in memory stays on disk too. I/O thread."""
        self.store.touch(self._keys.file_name_of(chunk_hash))

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Wait until the directory was looked through, at most `timeout` seconds; whether it was."""
        return self.store.wait_scanned(timeout)

    def close(self) -> None:
        """Stop and join the background thread. What is stored stays."""
        self.store.close()

    def _file_name(self, mm_hash: str) -> str:
        return self._keys.file_name_of(chunk_hash_of(mm_hash))

    def _mismatch(self, header: ItemHeader, wanted: WantedItem) -> str | None:
        """The first thing in which a stored item is not what is wanted, or None."""
        if header.model != self._keys.key_model_name:  # "a/b" and "a-b" share their file names
            return "other_model"
        if header.dtype != self._keys.dtype:
            return "other_dtype"
        if not header.mm_hash and self._accept_unverified:
            # What nobody named can only be compared by its shape.
            wanted = replace(wanted, mm_hash="", fingerprint="", modality=header.modality)
        return header.mismatch(wanted)

    def _foreign_header(self, wanted: WantedItem, file_bytes: int) -> ItemHeader | None:
        """What a file that LMCache wrote would be, if its size is exactly that of the wanted item."""
        if wanted.width is None:
            return None
        header = ItemHeader(
            mm_hash="",
            model=self._keys.key_model_name,
            fingerprint="",
            modality="",
            num_tokens=wanted.num_tokens,
            width=wanted.width,
            dtype=self._keys.dtype,
        )
        return header if header.payload_bytes == file_bytes else None


def _checked(header: ItemHeader, payload: memoryview) -> memoryview:
    flat = payload.cast("B") if payload.format != "B" or payload.ndim != 1 else payload
    if len(flat) != header.payload_bytes:
        raise ValueError(f"a payload of {len(flat)} bytes for an item of {header.payload_bytes}")
    return flat
