# SPDX-License-Identifier: Apache-2.0
"""The bytes of a cache file: what was written is read again, and nothing else is."""

import dataclasses
from functools import partial

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_tiers import file_format
from storage_tiers.file_format import (
    BLOCK_BYTES,
    DamagedFile,
    decode_header,
    decode_trailer,
    encode_trailer,
    padded_bytes,
)
from storage_tiers.tier import ItemHeader, digest_of

PAYLOAD = bytes(range(256)) * 10
HEADER = ItemHeader(
    "a" * 64, "org/model", "f" * 64, "image", 5, 256, torch.bfloat16, digest_of(memoryview(PAYLOAD)), 1.25
)
TRAILER = encode_trailer(HEADER)


def file_of(header: ItemHeader = HEADER, payload: bytes = PAYLOAD) -> bytes:
    return payload + bytes(padded_bytes(len(payload)) - len(payload)) + encode_trailer(header)


def read_at(data: bytes, nbytes: int, offset: int) -> bytes:
    return data[offset : offset + nbytes]


def decode(data: bytes) -> ItemHeader:
    return decode_header(len(data), partial(read_at, data))


names = st.text(max_size=200)
headers = st.builds(
    ItemHeader,
    mm_hash=names,
    model=names,
    fingerprint=names,
    modality=names,
    num_tokens=st.integers(1, 1 << 20),
    width=st.integers(1, 1 << 14),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2, torch.uint8]),
    digest=st.binary(min_size=16, max_size=16),
    created=st.floats(0, 1e10),
)


@given(headers)
def test_a_header_survives(header: ItemHeader) -> None:
    trailer = encode_trailer(header)
    assert len(trailer) % BLOCK_BYTES == 0
    assert decode_trailer(trailer) == header


@pytest.mark.parametrize("length", [1, 3800, 4096, 9000, 100_000])
def test_names_of_any_length(length: int) -> None:
    header = dataclasses.replace(HEADER, mm_hash="x" * length)
    data = file_of(header)
    assert len(data) % BLOCK_BYTES == 0
    assert decode(data) == header


def test_the_payload_is_at_the_start_and_padding_is_zero() -> None:
    data = file_of()
    assert data[: len(PAYLOAD)] == PAYLOAD
    assert not any(data[len(PAYLOAD) : padded_bytes(len(PAYLOAD))])
    assert len(data) == 2 * BLOCK_BYTES


def test_the_layout_on_disk_does_not_change() -> None:
    """Files of earlier versions must stay readable: this digest changes only with the format's version."""
    assert xxhash.xxh3_64_hexdigest(TRAILER) == "174a988a79811730"
    assert TRAILER[-64:-56] == b"LMC-EC\r\n"


def test_every_single_bit_counts() -> None:
    for position in range(len(TRAILER)):
        for bit in range(8):
            flipped = bytearray(TRAILER)
            flipped[position] ^= 1 << bit
            with pytest.raises(DamagedFile):
                decode_trailer(bytes(flipped))


@given(st.lists(st.tuples(st.integers(0, len(TRAILER) - 1), st.integers(1, 255)), min_size=1, max_size=20))
@settings(max_examples=300)
def test_any_damage_is_detected(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(TRAILER)
    for position, mask in changes:
        damaged[position] ^= mask
    if damaged != TRAILER:
        with pytest.raises(DamagedFile):
            decode(PAYLOAD + bytes(BLOCK_BYTES - len(PAYLOAD) % BLOCK_BYTES) + bytes(damaged))


def test_every_truncation_is_detected() -> None:
    data = file_of()
    for length in range(len(data)):
        with pytest.raises(DamagedFile):
            decode(data[:length])


@pytest.mark.parametrize("extra", [1, 64, BLOCK_BYTES])
def test_anything_behind_or_before_is_detected(extra: int) -> None:
    with pytest.raises(DamagedFile):
        decode(file_of() + bytes(extra))
    with pytest.raises(DamagedFile, match="size"):
        decode(bytes(BLOCK_BYTES) + file_of())


@given(st.binary(max_size=3 * BLOCK_BYTES))
def test_rubbish_is_no_file(data: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode(data)


def test_the_kind_tells_what_is_wrong() -> None:
    kinds = {}
    for name, data in {"nothing": b"", "payload alone": PAYLOAD, "a flip": file_of()[:-1] + b"!"}.items():
        with pytest.raises(DamagedFile) as caught:
            decode(data)
        kinds[name] = caught.value.kind
    assert kinds == {"nothing": "empty", "payload alone": "no_trailer", "a flip": "trailer"}


def forged(**changes: object) -> bytes:
    """A trailer with a right digest over a record that says something impossible."""
    record = {
        "format": 1,
        "mm_hash": "a",
        "model": "m",
        "fingerprint": "f",
        "modality": "image",
        "shape": [5, 256],
        "dtype": "bfloat16",
        "payload_bytes": len(PAYLOAD),
        "digest": bytes(16),
        "created": 1.0,
    }
    packed = msgspec.msgpack.encode(record | changes)
    version = changes.get("format", 1)
    region = bytearray(padded_bytes(len(packed) + 64))
    region[: len(packed)] = packed
    file_format._FOOTER.pack_into(region, len(region) - 64, b"LMC-EC\r\n", version, len(packed), bytes(16))
    region[-16:] = xxhash.xxh3_128_digest(bytes(region[:-16]))
    return bytes(region)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, None),
        ({"payload_bytes": 1}, "trailer"),
        ({"shape": [5, 0]}, "trailer"),
        ({"shape": [-5, -256]}, "trailer"),
        ({"shape": [5]}, "trailer"),
        ({"dtype": "complex"}, "trailer"),
        ({"digest": b"short"}, "trailer"),
        ({"mm_hash": 7}, "trailer"),
        ({"surprise": 1}, "trailer"),
        ({"format": 2}, "other_version"),
    ],
)
def test_a_record_that_makes_no_sense(changes: dict[str, object], kind: str | None) -> None:
    if kind is None:
        decode_trailer(forged(**changes))
        return
    with pytest.raises(DamagedFile) as caught:
        decode_trailer(forged(**changes))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "changes", [{"num_tokens": 0}, {"width": 0}, {"digest": b""}, {"digest": b"x" * 17}, {"model": "x" * (1 << 20)}]
)
def test_what_cannot_be_stored_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        encode_trailer(dataclasses.replace(HEADER, **changes))  # type: ignore[arg-type]
