# SPDX-License-Identifier: Apache-2.0
"""The segment: who owns it, who may remove it, and that nobody's memory goes away under a view."""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import storage_tiers.shared_segment as module
from storage_tiers.shared_segment import (
    PAGE_BYTES,
    SharedSegment,
    find_live_segment,
    remove_leftovers,
    segment_name,
)

ROOT = Path(__file__).parents[2]
PROLOGUE = """
import os, sys, time
from pathlib import Path
from storage_tiers.shared_segment import *
name, directory = sys.argv[1], Path(sys.argv[2])
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test_ec_{uuid.uuid4().hex}"
    yield name
    for path in Path("/dev/shm").glob(f"{name}*"):
        path.unlink()


def start(body: str, name: str, directory: Path = Path("/dev/shm")) -> "subprocess.Popen[str]":
    """A process that runs `body`; its first printed line says it got that far."""
    command = [sys.executable, "-c", PROLOGUE + body, name, str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate("\n", timeout=60)
    return output.strip()


OWN = """
segment = SharedSegment.create(name, 1 << 20, 4096, directory)
segment.data[:5] = b"hello"
print("ready", flush=True)
sys.stdin.readline()
"""
ATTACH = """
segment = SharedSegment.attach(name, directory)
print("ready", flush=True)
sys.stdin.readline()
print(bytes(segment.data[:5]), int(segment.tensor()[segment.data_offset]))
segment.close()
"""


def test_layout_is_whole_pages_and_zeroed(name: str) -> None:
    segment = SharedSegment.create(name, 5 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert (segment.data_offset, segment.data_bytes, segment.nbytes) == (3 * 4096, 5 * 4096, 8 * 4096)
    assert (len(segment.buffer), len(segment.board_memory), len(segment.data)) == (8 * 4096, 2 * 4096, 5 * 4096)
    assert segment.tensor().data_ptr() % 4096 == 0
    assert not any(segment.board_memory) and not any(segment.data)
    assert segment.path.stat().st_mode & 0o777 == 0o600
    segment.close()


@pytest.mark.parametrize(("data", "board"), [(0, 0), (-4096, 0), (100, 0), (4096, 100), (4096, -4096)])
def test_sizes_are_checked(name: str, data: int, board: int) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        SharedSegment.create(name, data, board)


@pytest.mark.parametrize("bad", ["", "a/b", "../x", ".hidden"])
def test_a_name_cannot_leave_the_directory(bad: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        SharedSegment.create(bad, PAGE_BYTES)
    with pytest.raises(ValueError, match="no name"):
        SharedSegment.attach(bad)


def test_both_sides_see_the_same_bytes(name: str) -> None:
    segment = SharedSegment.create(name, 1 << 20, PAGE_BYTES)
    attached = SharedSegment.attach(name)
    assert attached.board_bytes == PAGE_BYTES
    segment.tensor()[segment.data_offset :] = 7
    assert set(attached.data) == {7}
    attached.board_memory[5] = 9
    assert segment.board_memory[5] == 9
    attached.close()
    segment.close()


def test_a_live_segment_of_the_same_name_is_left_alone(name: str) -> None:
    segment = SharedSegment.create(name, PAGE_BYTES)
    with pytest.raises(FileExistsError, match="live process owns"):
        SharedSegment.create(name, PAGE_BYTES)
    SharedSegment.attach(name).close()
    segment.close()


def test_another_process_attaches_and_outlives_the_owner_s_unlink(name: str) -> None:
    segment = SharedSegment.create(name, 1 << 20, PAGE_BYTES)
    segment.data[:5] = b"hello"
    worker = start(ATTACH, name)
    segment.close()
    assert not segment.path.exists()
    assert finish(worker) == f"{b'hello'!r} {ord('h')}"
    assert worker.returncode == 0


def test_an_attached_process_that_ends_removes_nothing(name: str) -> None:
    """Python's resource tracker would, a moment after the process has ended."""
    segment = SharedSegment.create(name, 1 << 20)
    worker = start(ATTACH + "\nos.kill(os.getpid(), 9)", name)
    finish(worker)
    time.sleep(0.3)
    assert segment.path.exists()
    segment.close()


def test_a_killed_owner_s_segment_is_removed_at_the_next_start(name: str) -> None:
    owner = start(OWN, name)
    assert remove_leftovers(name) == [], "its owner lives"
    owner.kill()
    owner.wait()
    assert (Path("/dev/shm") / name).exists()
    assert remove_leftovers(name) == [name]
    assert not (Path("/dev/shm") / name).exists()
    owner.communicate()


def test_a_killed_owner_s_name_can_be_used_at_once(name: str) -> None:
    """In a container the engine has the same process id after every restart."""
    owner = start(OWN, name)
    owner.kill()
    owner.communicate()
    segment = SharedSegment.create(name, PAGE_BYTES)
    assert not any(segment.data)
    segment.close()


def test_leftovers_are_told_from_others_by_prefix(name: str, tmp_path: Path) -> None:
    foreign, link = tmp_path / "other", tmp_path / f"{name}_link"
    foreign.write_bytes(b"x")
    link.symlink_to(foreign)
    (tmp_path / f"{name}_half_made").write_bytes(b"")
    live = SharedSegment.create(f"{name}_live", PAGE_BYTES, directory=tmp_path)
    assert remove_leftovers(name, tmp_path) == [f"{name}_half_made"]
    assert foreign.exists() and link.is_symlink() and live.path.exists()
    live.close()
    with pytest.raises(ValueError, match="empty prefix"):
        remove_leftovers("", tmp_path)


def test_a_worker_that_is_told_nothing_finds_its_engine_s_segment() -> None:
    engine = f"engine/{uuid.uuid4()} ünusual"
    mine, other = segment_name(engine, 0, os.getpid()), segment_name(engine, 1, os.getpid())
    assert mine != other and mine.isascii() and "/" not in mine
    segment = SharedSegment.create(mine, PAGE_BYTES)
    pids = [1, os.getppid(), os.getpid()]
    assert find_live_segment(engine, 0, pids) == mine
    assert find_live_segment(engine, 1, pids) is None
    assert find_live_segment(engine + "x", 0, pids) is None
    assert find_live_segment(engine, 0, [1]) is None
    segment.close()
    assert find_live_segment(engine, 0, pids) is None


def test_a_dead_engine_s_segment_is_not_found() -> None:
    engine = uuid.uuid4().hex
    name = segment_name(engine, 0, os.getpid())
    owner = start(OWN, name)
    assert find_live_segment(engine, 0, [os.getpid()]) == name
    owner.kill()
    owner.communicate()
    assert find_live_segment(engine, 0, [os.getpid()]) is None
    assert remove_leftovers(name) == [name]


def test_what_is_no_segment_is_not_attached(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedSegment.attach(name, tmp_path)
    for rubbish in (b"", b"short", b"NRNECSEG" + bytes(100), bytes(PAGE_BYTES)):
        (tmp_path / name).write_bytes(rubbish)
        with pytest.raises(ValueError, match=name):
            SharedSegment.attach(name, tmp_path)


@pytest.mark.parametrize(("at", "what"), [(0, "not a complete segment"), (8, "layout version"), (16, "says")])
def test_a_changed_header_is_refused(name: str, tmp_path: Path, at: int, what: str) -> None:
    segment = SharedSegment.create(name, PAGE_BYTES, directory=tmp_path)
    segment.buffer[at] ^= 0x40
    with pytest.raises(ValueError, match=what):
        SharedSegment.attach(name, tmp_path)
    segment.close()


def test_a_truncated_segment_is_refused(name: str, tmp_path: Path) -> None:
    segment = SharedSegment.create(name, 2 * PAGE_BYTES, directory=tmp_path)
    os.truncate(segment.path, PAGE_BYTES)
    with pytest.raises(ValueError, match="and has 4096"):
        SharedSegment.attach(name, tmp_path)
    segment.close()


def test_a_segment_of_another_user_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SharedSegment.create(name, PAGE_BYTES, directory=tmp_path)
    monkeypatch.setattr(module.os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        SharedSegment.attach(name, tmp_path)
    segment.close()


def test_closing_under_live_views_keeps_their_memory(name: str) -> None:
    """Unmapping would be a SIGSEGV: the views outlive `close`, the segment object, and a collection."""
    segment = SharedSegment.create(name, 1 << 20)
    attached = SharedSegment.attach(name)
    tensor, window = segment.tensor()[PAGE_BYTES:].view(torch.bfloat16), attached.data[100:200]
    tensor.fill_(1.0)
    for side in (segment, attached, segment):
        side.close()
    del segment, attached
    gc.collect()
    assert tensor.float().sum() == tensor.numel()
    tensor.zero_()
    assert not any(window)


def test_closing_returns_the_memory_once_no_view_lives(name: str) -> None:
    segment = SharedSegment.create(name, 1 << 20)
    assert name in Path("/proc/self/maps").read_text()
    tensor = segment.tensor()
    segment.close()
    assert name in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert name in Path("/proc/self/maps").read_text(), "the mapping itself goes with the segment object"
    del segment
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


def test_a_closed_segment_gives_no_views(name: str) -> None:
    segment = SharedSegment.create(name, PAGE_BYTES)
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        _ = segment.buffer
    with pytest.raises(ValueError, match="closed"):
        segment.tensor()
    assert segment.populate(threading.Event()) == 0


def test_closing_does_not_remove_a_successor(name: str, tmp_path: Path) -> None:
    segment = SharedSegment.create(name, PAGE_BYTES, directory=tmp_path)
    segment.path.unlink()
    successor = SharedSegment.create(name, PAGE_BYTES, directory=tmp_path)
    segment.close()
    assert successor.path.exists()
    successor.close()


@pytest.mark.parametrize("has_populate", [True, False])
def test_populating_changes_no_byte(name: str, monkeypatch: pytest.MonkeyPatch, has_populate: bool) -> None:
    if not has_populate:
        monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as on kernels before 5.14
    segment = SharedSegment.create(name, 33 << 20)
    attached = SharedSegment.attach(name)
    segment.data[::4097] = b"\xa5" * len(segment.data[::4097])
    before = bytes(segment.data)
    resident_before = resident_bytes(segment)
    assert attached.populate(threading.Event()) == segment.nbytes
    assert resident_bytes(segment) >= resident_before + segment.nbytes
    assert segment.populate(threading.Event()) == segment.nbytes
    assert bytes(attached.data) == before
    attached.close()
    segment.close()


def resident_bytes(segment: SharedSegment) -> int:
    """What all of this process's mappings of the segment's file have faulted in."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            ours = line.endswith(segment.name)
        elif ours and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def test_populating_stops(name: str) -> None:
    segment = SharedSegment.create(name, 64 << 20)
    stop = threading.Event()
    stop.set()
    assert segment.populate(stop) == 0
    segment.close()


def test_closing_while_populating_is_safe(name: str) -> None:
    for _ in range(5):
        segment = SharedSegment.create(name, 64 << 20)
        thread = threading.Thread(target=segment.populate, args=(threading.Event(),))
        thread.start()
        segment.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("child_closes", [True, False])
def test_a_forked_child_neither_keeps_the_lock_nor_removes_the_file(
    name: str, tmp_path: Path, child_closes: bool
) -> None:
    script = f"""
segment = SharedSegment.create(name, 4096, 0, directory)
child = os.fork()
if child == 0:
    if {child_closes}:
        segment.close()
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
print(child, segment.path.exists(), flush=True)
os._exit(0)
"""
    owner = start(script, name, tmp_path)
    assert owner.stdout is not None
    child, exists = owner.stdout.readline().split()
    try:
        assert exists == "True"
        owner.wait(20)
        assert remove_leftovers(name, tmp_path) == [name], "the owner is dead, whatever its child does"
    finally:
        os.kill(int(child), 9)
        owner.communicate()


@pytest.fixture
def tiny_shm(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs a tmpfs of its own, and mount says: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("precheck", [True, False])
def test_too_small_a_file_system_is_an_error_that_names_the_sizes(
    tiny_shm: Path, name: str, monkeypatch: pytest.MonkeyPatch, precheck: bool
) -> None:
    """LMCache's segment is a SIGBUS there, in the middle of a copy. Nothing is left behind."""
    if not precheck:  # as if another process took the space in between
        stats = os.statvfs_result((4096, 4096, 1 << 40, 1 << 40, 1 << 40, 0, 0, 0, 0, 255))
        monkeypatch.setattr(module.os, "fstatvfs", lambda fd: stats)
    with pytest.raises(OSError, match=f"the segment needs {(2 << 20) + 4096} bytes") as caught:
        SharedSegment.create(name, 2 << 20, directory=tiny_shm)
    assert caught.value.errno == errno.ENOSPC
    assert str(tiny_shm) in str(caught.value)
    assert list(tiny_shm.iterdir()) == []
    monkeypatch.undo()
    SharedSegment.create(name, 512 << 10, directory=tiny_shm).close()


def test_two_starts_at_once_leave_one_owner_each(tmp_path: Path) -> None:
    """Creators and removers in a race: nobody loses a segment that somebody owns."""
    stop, errors = threading.Event(), []

    def remove() -> None:
        while not stop.is_set():
            remove_leftovers("race", tmp_path)

    def create(number: int) -> None:
        for _ in range(200):
            segment = SharedSegment.create(f"race{number}", PAGE_BYTES, directory=tmp_path)
            if not segment.path.exists():
                errors.append(number)
            segment.close()

    remover = threading.Thread(target=remove)
    creators = [threading.Thread(target=create, args=(number,)) for number in range(2)]
    for thread in (remover, *creators):
        thread.start()
    for thread in creators:
        thread.join(60)
    stop.set()
    remover.join(60)
    assert errors == []
