# SPDX-License-Identifier: Apache-2.0
"""The contract that every tier below the pool keeps, as tests.

A tier's test module says how to open the tier, and how to plant and damage items behind its back, in a subclass of
`TierRig`, and inherits `TierContract` with a fixture `rig`. What only some tiers have (a budget, a file system) is
tested in their own modules.
"""

import abc
import enum
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from storage_tiers.faults import FaultLog
from storage_tiers.key import KeySpace, WantedItem, chunk_hash_of
from storage_tiers.tier import ItemHeader, LowerTier, digest_of

MODEL = "org/model"
KEYS = KeySpace(MODEL, torch.bfloat16)

Stored = tuple[ItemHeader, bytes]


class Damage(enum.Enum):
    """Ways in which bytes go wrong below a tier. A rig may not know all of them."""

    EMPTY = "empty"
    TORN = "torn"
    """Cut in the middle of the payload."""
    NO_TRAILER = "no_trailer"
    """The payload alone."""
    FLIPPED_PAYLOAD = "flipped_payload"
    FLIPPED_TRAILER = "flipped_trailer"
    RUBBISH = "rubbish"
    """As long as it was, every byte random."""


def make_item(mm_hash: str, rows: int = 4, width: int = 1000, keys: KeySpace = KEYS, **changes: object) -> Stored:
    """An item with random bytes that depend on its name and shape, and its header."""
    header = ItemHeader(mm_hash, keys.key_model_name, "fingerprint", "image", rows, width, keys.dtype, created=1.5)
    header = replace(header, **changes)  # type: ignore[arg-type]
    seed = chunk_hash_of(f"{mm_hash}/{header.fingerprint}/{header.num_tokens}")
    payload = np.random.default_rng(seed).bytes(header.payload_bytes)
    return replace(header, digest=digest_of(memoryview(payload))), payload


def read(tier: LowerTier, wanted: WantedItem) -> bytes | None:
    """What the hierarchy would get: probe, then read into memory that held something else."""
    header = tier.probe(wanted)
    if header is None:
        return None
    payload = bytearray(b"\xa5" * header.payload_bytes)
    return bytes(payload) if tier.read_into(header, memoryview(payload)) else None


class TierRig(abc.ABC):
    """One place where items are stored, which several tiers, one after the other or at once, can be opened on."""

    def __init__(self) -> None:
        self.faults = FaultLog()
        self._opened: list[LowerTier] = []

    def open(self, keys: KeySpace = KEYS, **options: object) -> LowerTier:
        """A new tier on the place, as a new process would have it."""
        tier = self.new_tier(keys, **options)
        self._opened.append(tier)
        return tier

    def close(self) -> None:
        """Close all that were opened."""
        for tier in self._opened:
            tier.close()

    @abc.abstractmethod
    def new_tier(self, keys: KeySpace, **options: object) -> LowerTier:
        """Open a tier that reports to `self.faults`."""

    @abc.abstractmethod
    def plant(self, item: Stored, *, name_of: str | None = None, keys: KeySpace = KEYS) -> None:
        """Store a valid item behind the tiers' back; under the 64-bit name of `name_of` where that is given."""

    @abc.abstractmethod
    def plant_foreign(self, mm_hash: str, payload: bytes) -> None:
        """Store what LMCache itself would: the payload alone."""

    @abc.abstractmethod
    def damage(self, mm_hash: str, how: Damage) -> None:
        """Damage a stored item behind the tiers' back; `pytest.skip` where the place cannot be damaged so."""

    @abc.abstractmethod
    def delete(self, mm_hash: str) -> None:
        """Delete a stored item behind the tiers' back."""

    @abc.abstractmethod
    def holds(self, mm_hash: str) -> bool:
        """Whether anything is stored under the item's name."""


class TierContract:
    """Tests that every tier inherits. The subclass provides the fixture `rig`."""

    @pytest.fixture
    def rig(self, **_: object) -> TierRig:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, rig: TierRig) -> LowerTier:
        return rig.open()

    # What was stored comes back.

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8])
    @pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 2048), (64, 128), (577, 1152), (333, 3584)])
    def test_an_item_comes_back_bit_exact(self, rig: TierRig, rows: int, width: int, dtype: torch.dtype) -> None:
        keys = KeySpace(MODEL, dtype)
        tier = rig.open(keys)
        header, payload = make_item("a" * 64, rows, width, keys)
        assert tier.write(header, memoryview(payload))
        assert tier.probe(header.as_wanted()) == header
        assert read(tier, header.as_wanted()) == payload
        assert not rig.faults.counts()

    def test_the_width_need_not_be_known(self, tier: LowerTier) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        assert read(tier, replace(header.as_wanted(), width=None)) == payload

    def test_it_is_listed_once_it_was_written(self, tier: LowerTier) -> None:
        header, payload = make_item("a")
        assert not tier.lists(header.chunk_hash)
        tier.write(header, memoryview(payload))
        assert tier.lists(header.chunk_hash)
        tier.remove("a")
        assert not tier.lists(header.chunk_hash)

    def test_what_is_absent_is_a_quiet_miss(self, rig: TierRig, tier: LowerTier) -> None:
        assert tier.probe(make_item("absent")[0].as_wanted()) is None
        assert not tier.read_into(make_item("absent")[0], memoryview(bytearray(8000)))
        assert tier.remove("absent") is False
        assert not rig.faults.counts()

    def test_a_write_replaces(self, tier: LowerTier) -> None:
        old, new = make_item("a", rows=4), make_item("a", rows=9, fingerprint="newer")
        tier.write(old[0], memoryview(old[1]))
        tier.write(new[0], memoryview(new[1]))
        assert read(tier, new[0].as_wanted()) == new[1]
        assert tier.probe(old[0].as_wanted()) is None

    def test_a_removed_item_is_gone(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        assert tier.remove("a") is True
        assert tier.remove("a") is False
        assert tier.probe(header.as_wanted()) is None
        assert not rig.holds("a")

    def test_a_restart_finds_all(self, rig: TierRig) -> None:
        items = [make_item(f"{number:064x}", rows=1 + number) for number in range(20)]
        before = rig.open()
        for header, payload in items:
            before.write(header, memoryview(payload))
        before.close()
        after = rig.open()
        assert [read(after, header.as_wanted()) for header, _ in items] == [payload for _, payload in items]

    def test_what_another_process_stored_is_found(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        assert tier.probe(header.as_wanted()) is None
        rig.plant((header, payload))
        assert read(tier, header.as_wanted()) == payload

    def test_a_buffer_of_another_length_is_refused(self, tier: LowerTier) -> None:
        header, payload = make_item("a")
        with pytest.raises(ValueError, match="payload"):
            tier.write(header, memoryview(payload)[:-1])
        tier.write(header, memoryview(payload))
        with pytest.raises(ValueError, match="payload"):
            tier.read_into(header, memoryview(bytearray(len(payload) + 1)))

    def test_an_item_that_cannot_be_verified_is_not_stored(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        assert tier.write(replace(header, digest=b""), memoryview(payload)) is False
        assert not rig.holds("a")
        assert rig.faults.counts()

    # What is not what was asked for is a miss.

    @pytest.mark.parametrize(
        ("change", "counted"),
        [
            ({"fingerprint": "of other weights"}, "other_fingerprint"),
            ({"num_tokens": 5}, "other_num_tokens"),
            ({"modality": "video"}, "other_modality"),
            ({"width": 999}, "other_width"),
        ],
    )
    def test_another_item_is_a_miss_and_stays(
        self, rig: TierRig, tier: LowerTier, change: dict[str, object], counted: str
    ) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        assert tier.probe(replace(header.as_wanted(), **change)) is None  # type: ignore[arg-type]
        assert rig.faults.count(tier.name, counted) == 1
        assert read(tier, header.as_wanted()) == payload

    def test_a_collision_of_the_64_bit_name_is_a_miss(self, rig: TierRig, tier: LowerTier) -> None:
        wanted, other = make_item("a")[0].as_wanted(), make_item("b")
        rig.plant(other, name_of="a")
        assert tier.probe(wanted) is None
        assert rig.faults.count(tier.name, "other_item") == 1
        assert rig.holds("a")
        assert tier.remove("a") is False, "that would remove somebody else's"
        assert rig.holds("a")
        mine, payload = make_item("a")
        assert tier.write(mine, memoryview(payload))
        assert read(tier, wanted) == payload

    def test_another_model_of_the_same_file_name_is_a_miss(self, rig: TierRig) -> None:
        mine, theirs = KeySpace("org/model", torch.bfloat16), KeySpace("org-model", torch.bfloat16)
        header, payload = make_item("a", keys=theirs)
        rig.open(theirs).write(header, memoryview(payload))
        assert rig.open(mine).probe(header.as_wanted()) is None

    def test_namespaces_do_not_share(self, rig: TierRig) -> None:
        ours = KeySpace(MODEL, torch.bfloat16, namespace="tenant")
        header, payload = make_item("a")
        rig.open().write(header, memoryview(payload))
        assert rig.open(ours).probe(header.as_wanted()) is None

    def test_an_item_of_another_key_space_is_refused(self, tier: LowerTier) -> None:
        header, payload = make_item("a", model="other")
        with pytest.raises(ValueError, match="other"):
            tier.write(header, memoryview(payload))

    # What is damaged is a miss, is removed, and is counted.

    @pytest.mark.parametrize("how", list(Damage))
    @pytest.mark.parametrize("restarted", [False, True])
    def test_damage_is_a_miss_and_removed(self, rig: TierRig, tier: LowerTier, how: Damage, restarted: bool) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        rig.damage("a", how)
        if restarted:
            tier = rig.open()
        assert read(tier, header.as_wanted()) is None
        assert not rig.holds("a")
        assert sum(rig.faults.counts().values()) == 1
        assert not tier.lists(header.chunk_hash)
        assert tier.write(header, memoryview(payload))
        assert read(tier, header.as_wanted()) == payload

    @pytest.mark.parametrize("how", list(Damage))
    def test_damage_between_probe_and_read(self, rig: TierRig, tier: LowerTier, how: Damage) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        found = tier.probe(header.as_wanted())
        assert found is not None
        rig.damage("a", how)
        buffer = bytearray(len(payload))
        if tier.read_into(found, memoryview(buffer)):
            assert how in (Damage.FLIPPED_TRAILER, Damage.NO_TRAILER)
            assert bytes(buffer) == payload, "the bytes may be served only if they are right"
        else:
            assert not rig.holds("a")

    def test_deleted_between_probe_and_read(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        found = tier.probe(header.as_wanted())
        assert found is not None
        rig.delete("a")
        assert not tier.read_into(found, memoryview(bytearray(len(payload))))
        assert not tier.lists(header.chunk_hash)
        assert not rig.faults.counts()

    def test_replaced_between_probe_and_read(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        tier.write(header, memoryview(payload))
        found = tier.probe(header.as_wanted())
        assert found is not None
        newer = make_item("a", fingerprint="newer")
        rig.plant(newer)
        assert not tier.read_into(found, memoryview(bytearray(len(payload))))
        assert read(tier, newer[0].as_wanted()) == newer[1], "the newer item must not be taken for a damaged one"

    # What LMCache wrote is used only where that was asked for.

    def test_a_foreign_file_is_a_miss(self, rig: TierRig, tier: LowerTier) -> None:
        header, payload = make_item("a")
        rig.plant_foreign("a", payload)
        assert tier.probe(header.as_wanted()) is None

    def test_a_foreign_file_is_served_where_accepted(self, rig: TierRig) -> None:
        tier = rig.open(accept_unverified=True)
        header, payload = make_item("a")
        rig.plant_foreign("a", payload)
        found = tier.probe(header.as_wanted())
        assert found is not None
        assert found.digest == b""
        assert found.fingerprint == ""
        assert read(tier, header.as_wanted()) == payload
        for change in ({"num_tokens": 3}, {"num_tokens": 5}, {"width": None}):
            assert tier.probe(replace(header.as_wanted(), **change)) is None
        assert rig.holds("a")

    # Several at once.

    def test_many_threads(self, rig: TierRig, tier: LowerTier) -> None:
        items = [make_item(f"{number}", rows=1 + number % 7) for number in range(12)]
        wrong: list[str] = []
        stop = time.monotonic() + 1.0

        def run(seed: int) -> None:
            random = np.random.default_rng(seed)
            while time.monotonic() < stop:
                header, payload = items[random.integers(len(items))]
                action = random.integers(4)
                if action == 0:
                    tier.write(header, memoryview(payload))
                elif action == 1 and seed == 0:
                    tier.remove(header.mm_hash)
                elif read(tier, header.as_wanted()) not in (None, payload):
                    wrong.append(header.mm_hash)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert not rig.faults.counts()
