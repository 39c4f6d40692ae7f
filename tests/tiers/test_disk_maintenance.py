# SPDX-License-Identifier: Apache-2.0
"""Looking after a cache directory from outside, also while a server uses it."""

import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from storage_tiers.disk_directory import CacheDirectory
from storage_tiers.disk_index import DiskEntry
from storage_tiers.disk_inspection import (
    PROBLEMS,
    BadKeyError,
    PruneRule,
    find,
    inspect,
    open_directory,
    reports,
    stats,
)
from storage_tiers.disk_maintenance import (
    Copied,
    DirectorySource,
    Remover,
    TarSource,
    copy_into,
    copy_to_tar,
    prune,
    verify,
)
from storage_tiers.key import KeySpace
from tests.tiers.contract import KEYS, Damage, make_item
from tests.tiers.disk_rig import ITEM_BYTES, DiskRig, in_another_process, join, opened, put, served


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path / "cache")
    rig.directory.mkdir()
    yield rig
    rig.close()


def flipped(at: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        data[at] ^= 4

    return damage


def cut(at: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        del data[at:]

    return damage


def longer(more: bytes) -> Callable[[bytearray], None]:
    return lambda data: data.extend(more)


def without_its_first_block(data: bytearray) -> None:
    del data[:4096]


def twice(data: bytearray) -> None:
    data.extend(bytes(data))


IN_PLACE: list[tuple[Callable[[bytearray], None], str]] = [
    (flipped(0), "digest"),
    (flipped(4096), "digest"),
    (flipped(7999), "digest"),
    (flipped(8000), "padding"),
    (flipped(8191), "padding"),
    (flipped(8192), "trailer"),  # the record's first byte
    (flipped(-4000), "trailer"),
    (flipped(-100), "trailer"),  # zeros behind the record
    (flipped(-64), "torn"),  # the footer's magic
    (flipped(-56), "trailer"),  # its version
    (flipped(-52), "trailer"),  # the record's length: still in one block
    (flipped(-50), "torn"),  # and more than the file has
    (flipped(-49), "trailer"),  # and more than is allowed
    (flipped(-30), "trailer"),  # zeros in the footer
    (flipped(-1), "trailer"),  # the trailer's own digest
    (cut(-1), "torn"),
    (cut(-64), "torn"),
    (cut(-2000), "torn"),
    (cut(0), "empty"),
    (longer(b"x"), "torn"),
    (longer(bytes(8192)), "torn"),
    (twice, "size"),
    (without_its_first_block, "size"),
]
"""Damage to the bytes of an entry, and what it must be called."""


def damage_25(rig: DiskRig) -> dict[str, str]:
    """Damage 25 of the entries "0", "1", ..., each in another way; the file names and what each must be called."""
    expected = {}
    for number, (change, problem) in enumerate(IN_PLACE):
        path = rig.path(f"{number}")
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        expected[path.name] = problem
    for number, name in ((23, rig.path("no such item").name), (24, rig.path("24").name.replace("bfloat16", "half"))):
        rig.path(f"{number}").rename(rig.directory / name)
        expected[name] = "name"
    assert len(expected) == 25
    return expected


# Verify.


def test_verify_finds_exactly_the_damaged_and_the_rest_is_served(rig: DiskRig) -> None:
    for number in range(2000):
        rig.plant(make_item(f"{number}"))
    expected = damage_25(rig)
    directory = open_directory(rig.directory)

    verdicts = list(verify(directory))
    assert {one.entry.file_name: one.entry.problem for one in verdicts if one.is_bad} == expected
    assert [one.done for one in verdicts] == list(range(1, 2001))
    assert not any(one.removed for one in verdicts)
    assert len(rig.entries()) == 2000

    fixed = {one.entry.file_name for one in verify(directory, fix=True) if one.removed}
    assert fixed == set(expected)
    assert not any(one.is_bad for one in verify(directory))
    tier = opened(rig)
    assert [number for number in range(2000) if not served(tier, f"{number}")] == list(range(25))
    assert tier.store.used_bytes == rig.used() == 1975 * ITEM_BYTES
    assert not rig.faults.counts()


def test_what_the_server_serves_wrongly_never_but_verify_cannot_see(rig: DiskRig) -> None:
    """A file cut off before its trailer looks as LMCache's own do. Only `strict` calls it bad, and those as well."""
    for name in ("good", "cut", "no trailer"):
        rig.plant(make_item(name))
    rig.damage("cut", Damage.TORN)
    rig.damage("no trailer", Damage.NO_TRAILER)
    rig.plant_foreign("LMCache's", bytes(8000))
    directory = open_directory(rig.directory)
    assert sorted(one.entry.state for one in verify(directory, fix=True)) == ["ok", *["unverified"] * 3]
    assert len(rig.entries()) == 4
    assert sum(one.removed for one in verify(directory, fix=True, strict=True)) == 3
    assert rig.entries() == [rig.path("good")]


def test_what_servers_write_is_good_under_any_name(rig: DiskRig) -> None:
    for keys in (KeySpace("Org/Mo-del_1.5", torch.float16, "tenant"), KEYS):
        tier = rig.open(keys)
        for mm_hash in ("lora:" + "0f" * 32, "a client's ünique id / 7", "x" * 5000):
            header, payload = make_item(mm_hash, keys=keys)
            assert tier.write(header, memoryview(payload))
    assert [one.entry.state for one in verify(open_directory(rig.directory))] == ["ok"] * 6


def test_every_problem_has_words(rig: DiskRig) -> None:
    assert {problem for _, problem in IN_PLACE} < PROBLEMS.keys()


def test_what_was_put_through_lmcache_is_known_by_model_and_dtype_only(rig: DiskRig) -> None:
    rig.plant(make_item("", fingerprint="", modality=""), name_of="any")
    rig.plant(make_item("", fingerprint="", modality=""), name_of="any", keys=KeySpace("other/model", KEYS.dtype))
    found = {one.entry.file_name.partition("@")[0]: one.entry.problem for one in verify(open_directory(rig.directory))}
    assert found == {"org-model": "", "other-model": "name"}


def test_an_entry_of_another_version_is_left_alone(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("storage_tiers.file_format._VERSION", 2)
        rig.plant(make_item("newer"))
    (verdict,) = verify(open_directory(rig.directory), fix=True)
    assert (verdict.entry.state, verdict.entry.problem, verdict.is_bad) == ("unverified", "other_version", False)
    assert rig.holds("newer")


def test_entries_that_vanish_meanwhile_are_left_out(rig: DiskRig) -> None:
    for name in "abc":
        rig.plant(make_item(name))
    verdicts = verify(open_directory(rig.directory), fix=True)
    next(verdicts)
    for path in rig.entries():
        path.unlink()
    assert list(verdicts) == []


def test_an_unreadable_entry_is_bad_and_stays(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    rig.plant(make_item("a"))
    monkeypatch.setattr("storage_tiers.disk_inspection.file_digest", failing)
    (verdict,) = verify(open_directory(rig.directory), fix=True)
    assert (verdict.entry.problem, verdict.is_bad, verdict.removed) == ("unreadable", True, False)
    assert "Input/output error" in verdict.entry.detail
    assert rig.holds("a")


def test_fix_does_not_remove_the_good_item_that_replaced_a_bad_one(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.plant(make_item("a"))
    rig.damage("a", Damage.FLIPPED_PAYLOAD)
    plain = Remover.remove_open

    def late(self: Remover, name: str, fd: int) -> bool:
        rig.plant(make_item("a"))
        return plain(self, name, fd)

    monkeypatch.setattr(Remover, "remove_open", late)
    (verdict,) = verify(open_directory(rig.directory), fix=True)
    assert (verdict.is_bad, verdict.removed) == (True, False)
    assert served(rig.open(), "a")


def test_what_cannot_be_removed_is_reported(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: object, name: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    for name in "ab":
        rig.plant(make_item(name))
        rig.damage(name, Damage.FLIPPED_PAYLOAD)
    monkeypatch.setattr(CacheDirectory, "unlink", refusing)
    directory = open_directory(rig.directory)
    assert ["Permission denied" in one.error for one in verify(directory, fix=True)] == [True, True]
    assert [one.outcome for one in prune(directory, PruneRule(max_bytes=ITEM_BYTES))] == ["failed", "failed"]


# Looks.


def test_stats_count_by_what_trailers_say(rig: DiskRig) -> None:
    rig.plant(make_item("a"))
    rig.plant(make_item("b", modality="video"))
    rig.plant(make_item("c", fingerprint="new"))
    rig.plant(make_item("d", keys=KeySpace("other", torch.float16)), keys=KeySpace("other", torch.float16))
    rig.plant_foreign("e", bytes(100))
    rig.plant(make_item("f"))
    rig.damage("f", Damage.FLIPPED_TRAILER)
    found = stats(open_directory(rig.directory))
    assert (found.total.entries, found.total.nbytes) == (6, 5 * ITEM_BYTES + 100)
    assert {name: tally.entries for name, tally in found.by_model.items()} == {"org/model": 3, "other": 1}
    assert {name: tally.entries for name, tally in found.by_fingerprint.items()} == {"fingerprint": 3, "new": 1}
    assert {name: tally.nbytes for name, tally in found.by_modality.items()} == {
        "image": 3 * ITEM_BYTES,
        "video": ITEM_BYTES,
    }
    assert (found.unverified.nbytes, found.bad.nbytes) == (100, ITEM_BYTES)


def test_find_by_hash_by_its_beginning_and_by_file_name(rig: DiskRig) -> None:
    for name in ("abc", "abcd", "xyz"):
        rig.plant(make_item(name))
    directory = open_directory(rig.directory)
    assert find(directory, "abc") == rig.path("abc").name
    assert find(directory, "x") == rig.path("xyz").name
    assert find(directory, rig.path("xyz").name) == rig.path("xyz").name
    with pytest.raises(BadKeyError, match=r"names 2 entries.*abcd"):
        find(directory, "ab")
    for key in ("nope", "", rig.path("nope").name):
        with pytest.raises(BadKeyError, match="no entry"):
            find(directory, key)


def test_one_hash_under_two_models_is_ambiguous(rig: DiskRig) -> None:
    other = KeySpace("other", torch.float16)
    rig.plant(make_item("a"))
    rig.plant(make_item("a", keys=other), keys=other)
    with pytest.raises(BadKeyError, match=r"names 2 entries.*file name"):
        find(open_directory(rig.directory), "a")


def test_a_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="local_disk"):
        open_directory(tmp_path / "nope")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_directory(tmp_path / "file")


def test_looking_changes_nothing(rig: DiskRig) -> None:
    rig.plant(make_item("a"))
    rig.damage("a", Damage.FLIPPED_PAYLOAD)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in rig.directory.iterdir())
    directory = open_directory(rig.directory)
    (
        list(reports(directory)),
        stats(directory),
        list(verify(directory)),
        list(prune(directory, PruneRule(0), dry_run=True)),
    )
    inspect(directory, "absent")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in rig.directory.iterdir()) == before


# Prune and evict.


def plant_aged(rig: DiskRig, names: str, **changes: object) -> None:
    """Items of which the first was used longest ago: 1000, 990, ... seconds."""
    for number, name in enumerate(names):
        rig.plant(make_item(name, **changes))  # type: ignore[arg-type]
        then = int(time.time()) - 1000 + 10 * number
        os.utime(rig.path(name), (then, then))


def left(rig: DiskRig, names: str) -> str:
    return "".join(name for name in names if rig.holds(name))


def test_prune_to_a_size_takes_the_least_recently_used(rig: DiskRig) -> None:
    plant_aged(rig, "abcde")
    directory = open_directory(rig.directory)
    rule = PruneRule(max_bytes=2 * ITEM_BYTES + 1)
    assert [one.outcome for one in prune(directory, rule, dry_run=True)] == ["planned"] * 3
    assert left(rig, "abcde") == "abcde"
    assert [one.file_name for one in prune(directory, rule)] == [rig.path(name).name for name in "abc"]
    assert left(rig, "abcde") == "de"


def test_prune_by_age(rig: DiskRig) -> None:
    plant_aged(rig, "abcde")
    assert len(list(prune(open_directory(rig.directory), PruneRule(used_before=time.time() - 975)))) == 3
    assert left(rig, "abcde") == "de"


def test_prune_by_fingerprint_leaves_what_has_none(rig: DiskRig) -> None:
    plant_aged(rig, "ab", fingerprint="old-1")
    plant_aged(rig, "cd", fingerprint="new-1")
    rig.plant(make_item("e", fingerprint=""))
    rig.plant_foreign("f", bytes(100))
    directory = open_directory(rig.directory)
    assert len(list(prune(directory, PruneRule(fingerprint="old"), dry_run=True))) == 2
    assert len(list(prune(directory, PruneRule(not_fingerprint="old"), dry_run=True))) == 2
    assert len(list(prune(directory, PruneRule(fingerprint="old", not_fingerprint="old-1")))) == 0
    list(prune(directory, PruneRule(not_fingerprint="new")))
    assert left(rig, "abcdef") == "cdef"


def test_filters_and_size_together(rig: DiskRig) -> None:
    plant_aged(rig, "ab", fingerprint="new")
    plant_aged(rig, "cde", fingerprint="old")
    list(prune(open_directory(rig.directory), PruneRule(max_bytes=4 * ITEM_BYTES, fingerprint="old")))
    assert left(rig, "abcde") == "abde"


def test_what_is_used_meanwhile_stays_and_another_goes(rig: DiskRig) -> None:
    plant_aged(rig, "abcd")
    removals = prune(open_directory(rig.directory), PruneRule(max_bytes=2 * ITEM_BYTES))
    assert next(removals).outcome == "removed"
    os.utime(rig.path("b"))
    assert [one.outcome for one in removals] == ["in_use", "removed"]
    assert left(rig, "abcd") == "bd"


def test_removal_waits_for_the_lock_that_servers_take(rig: DiskRig) -> None:
    rig.plant(make_item("a"))
    name = rig.path("a").name
    outcomes = []
    remover = Remover(open_directory(rig.directory))
    thread = threading.Thread(target=lambda: outcomes.append(remover.remove(DiskEntry(name, ITEM_BYTES, 0)).outcome))
    with CacheDirectory(rig.directory).locked(1):
        thread.start()
        thread.join(0.2)
        assert rig.holds("a")
    thread.join(10)
    assert outcomes == ["removed"]
    assert remover.remove(DiskEntry(name, ITEM_BYTES, 0)).outcome == "gone"


def test_a_server_sees_what_was_removed(rig: DiskRig) -> None:
    rig.capacity = 4 * ITEM_BYTES
    tier = opened(rig)
    for name in "abcd":
        put(tier, name)
    list(prune(open_directory(rig.directory), PruneRule(max_bytes=2 * ITEM_BYTES)))
    for name in "ef":
        put(tier, name)
    assert tier.store.evicted == (0, 0), "there was room"
    assert tier.store.used_bytes == rig.used() == 4 * ITEM_BYTES


def test_beside_a_server_that_stores_and_reads(rig: DiskRig) -> None:
    """Another process stores all the time: nothing of its is called bad, and its account stays right."""
    rig.capacity = 40 * ITEM_BYTES
    (rig.directory / ".0-1-abc.tmp").write_bytes(b"of a writer on another host")
    end = time.monotonic() + 3

    def serve() -> None:
        tier = opened(rig)
        number = 0
        while time.monotonic() < end:
            put(tier, f"{number}")
            served(tier, f"{number}")  # may have been pruned already; wrong bytes would fail
            number += 1
        put(tier, "last")
        assert number > 50
        assert tier.store.used_bytes == rig.used() <= rig.capacity
        assert not rig.faults.counts(), rig.faults.counts()

    server = in_another_process(serve)
    directory = open_directory(rig.directory)
    looked_at = removed = 0
    while time.monotonic() < end - 0.5:
        for verdict in verify(directory, fix=True):
            assert not verdict.is_bad, verdict
            looked_at += 1
        removed += sum(one.outcome == "removed" for one in prune(directory, PruneRule(max_bytes=20 * ITEM_BYTES)))
    join(server)
    assert looked_at > 50
    assert removed > 0
    assert (rig.directory / ".0-1-abc.tmp").exists()
    tier = opened(rig)
    assert served(tier, "last")


# Copies between directories and machines.


def outcomes(copied: list[Copied]) -> dict[str, int]:
    return {kind: sum(one.outcome == kind for one in copied) for kind in {one.outcome for one in copied}}


def prepared(rig: DiskRig) -> CacheDirectory:
    """Three good entries, a bad one, and one of LMCache's."""
    plant_aged(rig, "abcd")
    rig.damage("d", Damage.FLIPPED_PAYLOAD)
    rig.plant_foreign("e", bytes(100))
    return open_directory(rig.directory)


def to_tar(source: DirectorySource, path: Path, **options: bool) -> list[Copied]:
    copied: list[Copied] = []
    copy_to_tar(path, source, on_copied=copied.append, **options)
    return copied


def test_copied_entries_are_served_and_keep_their_age(rig: DiskRig, tmp_path: Path) -> None:
    other = DiskRig(tmp_path / "other")
    copied = list(copy_into(CacheDirectory(other.directory), DirectorySource(prepared(rig))))
    assert outcomes(copied) == {"copied": 3, "bad": 1, "unverified": 1}
    assert left(other, "abcde") == "abc"
    assert other.path("a").stat().st_mtime == rig.path("a").stat().st_mtime
    assert all(served(other.open(), name) for name in "abc")
    assert not list(other.directory.glob(".*.tmp"))
    other.close()


def test_through_a_tar_file(rig: DiskRig, tmp_path: Path) -> None:
    path = tmp_path / "moved.tar"
    assert outcomes(to_tar(DirectorySource(prepared(rig)), path)) == {"copied": 3, "bad": 1, "unverified": 1}
    assert [one.name for one in tmp_path.iterdir() if one.name != "cache"] == ["moved.tar"]
    other = DiskRig(tmp_path / "other")
    into = CacheDirectory(other.directory)
    for expected in ({"copied": 3}, {"exists": 3}):
        with tarfile.open(path) as archive:
            assert outcomes(list(copy_into(into, TarSource(archive)))) == expected
    assert other.path("a").stat().st_mtime == rig.path("a").stat().st_mtime
    assert all(served(other.open(), name) for name in "abc")
    other.close()


def test_only_what_the_keys_name(rig: DiskRig, tmp_path: Path) -> None:
    directory = prepared(rig)
    to_tar(DirectorySource(directory, ["a", rig.path("b").name]), tmp_path / "two.tar")
    other = DiskRig(tmp_path / "other")
    with tarfile.open(tmp_path / "two.tar") as archive:
        list(copy_into(CacheDirectory(other.directory), TarSource(archive, ["b"])))
        with pytest.raises(BadKeyError):
            TarSource(archive, ["c"])
    assert left(other, "abcde") == "b"


def test_lmcaches_own_files_are_copied_if_asked_for(rig: DiskRig, tmp_path: Path) -> None:
    directory = prepared(rig)
    assert outcomes(to_tar(DirectorySource(directory), tmp_path / "all.tar", accept_unverified=True))["copied"] == 4
    other = CacheDirectory(tmp_path / "other")
    with tarfile.open(tmp_path / "all.tar") as archive:
        assert outcomes(list(copy_into(other, TarSource(archive), accept_unverified=True))) == {"copied": 4}
    assert (other.path / rig.path("e").name).read_bytes() == bytes(100)


def test_a_damaged_entry_there_is_replaced(rig: DiskRig, tmp_path: Path) -> None:
    rig.plant(make_item("a"))
    other = DiskRig(tmp_path / "other")
    other.directory.mkdir()
    other.plant(make_item("a"))
    other.damage("a", Damage.FLIPPED_PAYLOAD)
    source = DirectorySource(open_directory(rig.directory))
    assert outcomes(list(copy_into(CacheDirectory(other.directory), source))) == {"copied": 1}
    assert served(other.open(), "a")
    other.close()


def test_copies_keep_within_a_budget(rig: DiskRig, tmp_path: Path) -> None:
    plant_aged(rig, "abcdef")
    other = DiskRig(tmp_path / "other")
    source = DirectorySource(open_directory(rig.directory))
    list(copy_into(CacheDirectory(other.directory), source, capacity_bytes=3 * ITEM_BYTES))
    assert other.used() == 3 * ITEM_BYTES


def test_a_hostile_tar_file(rig: DiskRig, tmp_path: Path) -> None:
    rig.plant(make_item("a"))
    good = rig.path("a")
    path = tmp_path / "hostile.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in (
            (f"../../{good.name}", good.read_bytes()),  # the item, but nowhere else than in the directory
            ("../evil.sh", b"rm"),
            ("x@1@0@ff@half.pt", good.read_bytes()),  # one item under the name of another
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("y@1@0@ff@half.pt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    other = CacheDirectory(tmp_path / "a" / "b" / "other")
    with tarfile.open(path) as archive:
        copied = list(copy_into(other, TarSource(archive)))
    assert {(one.file_name, one.outcome, one.detail) for one in copied} == {
        (good.name, "copied", ""),
        ("x@1@0@ff@half.pt", "bad", "name"),
    }
    assert [path.name for path in (tmp_path / "a").rglob("*") if path.is_file() and path.suffix == ".pt"] == [good.name]


def test_an_existing_tar_file_is_not_overwritten(rig: DiskRig, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_text("precious")
    with pytest.raises(FileExistsError, match="remove it"):
        to_tar(DirectorySource(prepared(rig)), tmp_path / "x.tar")
    assert (tmp_path / "x.tar").read_text() == "precious"


def test_a_full_disk_leaves_no_temporary_file(rig: DiskRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    source = DirectorySource(prepared(rig), ["a"])
    monkeypatch.setattr("storage_tiers.disk_maintenance.shutil.copyfileobj", full)
    (copied,) = copy_into(CacheDirectory(tmp_path / "other"), source)
    assert copied.outcome == "failed"
    assert "No space left" in copied.detail
    assert not list((tmp_path / "other").glob("*.pt")) + list((tmp_path / "other").glob(".*.tmp"))


def test_an_entry_that_cannot_be_read_does_not_end_an_export(
    rig: DiskRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CacheDirectory.open_entry

    def failing(self: CacheDirectory, name: str) -> int | None:
        if name == rig.path("b").name:
            raise OSError(5, "Input/output error")
        return plain(self, name)

    plant_aged(rig, "abc")
    source = DirectorySource(open_directory(rig.directory))
    monkeypatch.setattr(CacheDirectory, "open_entry", failing)
    assert outcomes(to_tar(source, tmp_path / "two.tar")) == {"copied": 2, "failed": 1}
    assert outcomes(list(copy_into(CacheDirectory(tmp_path / "other"), source))) == {"copied": 2, "failed": 1}


def test_copying_into_a_directory_that_a_server_fills(rig: DiskRig, tmp_path: Path) -> None:
    """What comes in counts against the server's budget: its next publication makes room for both."""
    rig.capacity = 40 * ITEM_BYTES
    end = time.monotonic() + 2

    def serve() -> None:
        tier = opened(rig)
        number = 0
        while time.monotonic() < end:
            put(tier, f"{number % 60}")
            number += 1
        put(tier, "last")
        assert tier.store.used_bytes == rig.used() <= rig.capacity
        assert not rig.faults.counts(), rig.faults.counts()

    other = DiskRig(tmp_path / "other")
    other.directory.mkdir()
    for number in range(50):
        other.plant(make_item(f"copied {number}"))
    source = DirectorySource(open_directory(other.directory))
    server = in_another_process(serve)
    found: set[str] = set()
    while time.monotonic() < end - 0.5:
        found |= {one.outcome for one in copy_into(open_directory(rig.directory), source)}
    join(server)
    assert "copied" in found
    assert found <= {"copied", "exists"}
    assert all(not one.is_bad for one in verify(open_directory(rig.directory)))
