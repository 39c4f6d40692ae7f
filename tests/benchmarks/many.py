# SPDX-License-Identifier: Apache-2.0
"""100,000 small items: what the figures for large indices are taken with."""

import hashlib
import os
from pathlib import Path

from storage_tiers.file_format import encode_trailer, padded_bytes
from storage_tiers.key import chunk_hash_of
from storage_tiers.tier import digest_of
from tests.benchmarks.rig import KEYS, header_of
from tests.scheduler.items import Image

MANY = 100_000
ROWS = 8
WIDTH = 32


def tiny_image(number: int) -> Image:
    """Item `number` of those on the disk: [8, 32] of bfloat16, 512 bytes."""
    return Image(f"tiny-{number}", rows=ROWS)


def tiny_payload(mm_hash: str) -> bytes:
    """What such an item holds: other bytes for each."""
    return hashlib.sha256(mm_hash.encode()).digest() * (ROWS * WIDTH * 2 // 32)


def plant(directory: Path, fingerprint: str, count: int) -> None:
    """Put items number 0 to `count` there as files of ours, behind the disk tier's back: it would take minutes."""
    for number in range(count):
        mm_hash = tiny_image(number).identifier
        payload = tiny_payload(mm_hash)
        header = header_of(mm_hash, ROWS, WIDTH, fingerprint, digest_of(memoryview(payload)))
        content = payload + bytes(padded_bytes(len(payload)) - len(payload)) + encode_trailer(header)
        fd = os.open(directory / KEYS.file_name_of(chunk_hash_of(mm_hash)), os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, content)
        os.close(fd)
