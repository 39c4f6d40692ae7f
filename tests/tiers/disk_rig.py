# SPDX-License-Identifier: Apache-2.0
"""A cache directory that tests plant and damage files in, the way other processes and bad disks would."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from storage_tiers.disk_tier import DiskTier
from storage_tiers.file_format import encode_trailer, padded_bytes
from storage_tiers.key import KeySpace, chunk_hash_of
from storage_tiers.tier import LowerTier
from tests.tiers.contract import KEYS, Damage, Stored, TierRig, make_item, read

GIB = 1 << 30
ITEM_BYTES = 8192 + 4096
"""On disk, of an item as `make_item` makes it: 8,000 bytes of payload."""


class DiskRig(TierRig):
    """One directory; `capacity` in bytes holds for every tier opened on it."""

    def __init__(self, directory: Path, capacity: int = GIB) -> None:
        super().__init__()
        self.directory = directory
        self.capacity = capacity

    def new_tier(self, keys: KeySpace, **options: object) -> DiskTier:
        return DiskTier(self.directory, self.capacity, keys, self.faults, **options)  # type: ignore[arg-type]

    def path(self, mm_hash: str, keys: KeySpace = KEYS) -> Path:
        return self.directory / keys.file_name_of(chunk_hash_of(mm_hash))

    def plant(self, item: Stored, *, name_of: str | None = None, keys: KeySpace = KEYS) -> None:
        header, payload = item
        padding = bytes(padded_bytes(len(payload)) - len(payload))
        self._place(self.path(name_of or header.mm_hash, keys), payload + padding + encode_trailer(header))

    def plant_foreign(self, mm_hash: str, payload: bytes) -> None:
        self._place(self.path(mm_hash), payload)

    def damage(self, mm_hash: str, how: Damage) -> None:
        path = self.path(mm_hash)
        data = bytearray(path.read_bytes())
        if how is Damage.EMPTY:
            data = bytearray()
        elif how is Damage.TORN:
            del data[len(data) // 3 :]
        elif how is Damage.NO_TRAILER:
            del data[-4096:]
        elif how is Damage.FLIPPED_PAYLOAD:
            data[17] ^= 4
        elif how is Damage.FLIPPED_TRAILER:
            data[-4000] ^= 4
        else:
            data = bytearray(os.urandom(len(data)))
        path.write_bytes(data)  # in place: the same file, as a bad disk has it

    def delete(self, mm_hash: str) -> None:
        self.path(mm_hash).unlink()

    def holds(self, mm_hash: str) -> bool:
        return self.path(mm_hash).exists()

    def entries(self) -> list[Path]:
        return sorted(self.directory.glob("*.pt"))

    def used(self) -> int:
        """Bytes that entries really take."""
        return sum(path.stat().st_size for path in self.entries())

    def _place(self, path: Path, data: bytes) -> None:
        temporary = path.with_name("planting")
        temporary.write_bytes(data)
        temporary.replace(path)


def opened(rig: DiskRig, **options: object) -> DiskTier:
    tier = rig.open(**options)  # type: ignore[arg-type]
    assert isinstance(tier, DiskTier)
    assert tier.wait_scanned(30)
    return tier


def put(tier: LowerTier, mm_hash: str, rows: int = 4, **changes: object) -> None:
    header, payload = make_item(mm_hash, rows, **changes)  # type: ignore[arg-type]
    assert tier.write(header, memoryview(payload))


def served(tier: LowerTier, mm_hash: str, rows: int = 4) -> bool:
    header, payload = make_item(mm_hash, rows)
    found = read(tier, header.as_wanted())
    assert found in (None, payload)
    return found is not None


def in_another_process(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its id, for `os.waitpid` or `os.kill`. Exit code 0 is success."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the test run may go on in the child
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)


def join(*pids: int) -> None:
    """Wait for processes; all must have succeeded."""
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)
