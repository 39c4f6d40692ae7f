# SPDX-License-Identifier: Apache-2.0
"""The bytes of a cache file: payload, padding, trailer, footer.

    offset 0                  payload: the tensor, row-major, exactly as LMCache writes it
    align up to 4096          zero padding
    4096 · k bytes            msgpack record, zero padding, and in the last 64 bytes the footer

This room turns an `ItemHeader` into trailer bytes and back, and says exactly when bytes are not what was written. It is
pure: no file, no tier and no policy may enter; whoever has the bytes (a file, a remote store) brings them here.

The footer is magic, format version, length of the record, zeros, and the XXH3-128 of every other byte of the trailer,
so that no bit of a trailer can change unseen. Magic, digest and record length keep their places in later versions.
"""

import struct
from collections.abc import Callable

import msgspec
import xxhash

from storage_tiers.key import dtype_name, dtype_named
from storage_tiers.tier import ItemHeader

__all__ = ["BLOCK_BYTES", "DamagedFile", "decode_header", "decode_trailer", "encode_trailer", "padded_bytes"]

BLOCK_BYTES = 4096
"""Unit of every region of a file: what direct I/O asks of offsets and lengths."""

_MAGIC = b"LMC-EC\r\n"
_VERSION = 1
_FOOTER = struct.Struct("<8sII32x16s")
_DIGEST_BYTES = 16
_MAX_RECORD_BYTES = 1 << 20
"""A bound on what a damaged length can make us read; a record holds three names and a few numbers."""


class DamagedFile(ValueError):  # noqa: N818 - says what the bytes are, as FileNotFoundError does not
    """The bytes are not a whole file of this format."""

    def __init__(self, kind: str, detail: object = "") -> None:
        """`kind` is a short name for counting: empty, no_trailer, torn, trailer, other_version, size."""
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the msgpack record holds; `shape` is `[num_tokens, width]`."""

    format: int
    mm_hash: str
    model: str
    fingerprint: str
    modality: str
    shape: tuple[int, int]
    dtype: str
    payload_bytes: int
    digest: bytes
    created: float


def padded_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks of 4096 bytes. Any thread."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def encode_trailer(header: ItemHeader) -> bytes:
    """The trailer region for `header`, footer included: a multiple of 4096 bytes. Any thread.

    Raises ValueError for an item without rows, columns or a 16-byte digest, or with about a megabyte of names.
    """
    if header.num_tokens <= 0 or header.width <= 0 or len(header.digest) != _DIGEST_BYTES:
        raise ValueError(f"cannot be stored: [{header.num_tokens}, {header.width}], digest {header.digest.hex()!r}")
    record = msgspec.msgpack.encode(
        _Record(
            format=_VERSION,
            mm_hash=header.mm_hash,
            model=header.model,
            fingerprint=header.fingerprint,
            modality=header.modality,
            shape=(header.num_tokens, header.width),
            dtype=dtype_name(header.dtype),
            payload_bytes=header.payload_bytes,
            digest=header.digest,
            created=header.created,
        )
    )
    if len(record) > _MAX_RECORD_BYTES:
        raise ValueError(f"cannot be stored: {len(record)} bytes of names, {_MAX_RECORD_BYTES} are allowed")
    region = bytearray(_region_bytes(len(record)))
    region[: len(record)] = record
    _FOOTER.pack_into(region, len(region) - _FOOTER.size, _MAGIC, _VERSION, len(record), bytes(_DIGEST_BYTES))
    region[-_DIGEST_BYTES:] = xxhash.xxh3_128_digest(memoryview(region)[:-_DIGEST_BYTES])
    return bytes(region)


def decode_trailer(region: bytes) -> ItemHeader:
    """The header that `region`, a whole trailer with its footer, was made from. Any thread.

    Raises DamagedFile if a single bit is not as it was written.
    """
    if _trailer_bytes(region) != len(region):
        raise DamagedFile("torn", f"trailer of {len(region)} bytes")
    _, version, record_bytes, digest = _FOOTER.unpack_from(region, len(region) - _FOOTER.size)
    if xxhash.xxh3_128_digest(memoryview(region)[:-_DIGEST_BYTES]) != digest:
        raise DamagedFile("trailer", "digest of the trailer")
    if version != _VERSION:
        raise DamagedFile("other_version", version)
    try:
        record = msgspec.msgpack.decode(memoryview(region)[:record_bytes], type=_Record)
    except msgspec.DecodeError as error:
        raise DamagedFile("trailer", error) from error
    return _header_of(record)


def decode_header(file_bytes: int, read_at: Callable[[int, int], bytes]) -> ItemHeader:
    """The header of a file of `file_bytes`, of which `read_at(nbytes, offset)` returns a part. Any thread.

    Reads 4096 bytes from the end, seldom more. Raises DamagedFile, and whatever `read_at` raises.
    """
    if file_bytes == 0:
        raise DamagedFile("empty")
    region = read_at(BLOCK_BYTES, max(0, file_bytes - BLOCK_BYTES))
    needed = _trailer_bytes(region)
    if needed > file_bytes:
        raise DamagedFile("torn", f"trailer of {needed} bytes in a file of {file_bytes}")
    if needed > BLOCK_BYTES:
        region = read_at(needed, file_bytes - needed)
    header = decode_trailer(region)
    if padded_bytes(header.payload_bytes) + needed != file_bytes:
        raise DamagedFile("size", f"{file_bytes} bytes for a payload of {header.payload_bytes}")
    return header


def _trailer_bytes(tail: bytes) -> int:
    """Length in bytes of the trailer whose footer ends `tail`. Raises DamagedFile where `tail` ends in no footer."""
    if len(tail) < _FOOTER.size:
        raise DamagedFile("no_trailer", f"only {len(tail)} bytes")
    magic, _, record_bytes, _ = _FOOTER.unpack_from(tail, len(tail) - _FOOTER.size)
    if magic != _MAGIC:
        raise DamagedFile("no_trailer")
    if record_bytes > _MAX_RECORD_BYTES:
        raise DamagedFile("trailer", f"record of {record_bytes} bytes")
    return _region_bytes(record_bytes)


def _region_bytes(record_bytes: int) -> int:
    return padded_bytes(record_bytes + _FOOTER.size)


def _header_of(record: _Record) -> ItemHeader:
    dtype = dtype_named(record.dtype)
    if dtype is None or min(record.shape) <= 0 or len(record.digest) != _DIGEST_BYTES:
        raise DamagedFile("trailer", f"dtype {record.dtype}, shape {record.shape}")
    header = ItemHeader(
        mm_hash=record.mm_hash,
        model=record.model,
        fingerprint=record.fingerprint,
        modality=record.modality,
        num_tokens=record.shape[0],
        width=record.shape[1],
        dtype=dtype,
        digest=record.digest,
        created=record.created,
    )
    if header.payload_bytes != record.payload_bytes:
        raise DamagedFile("trailer", f"{record.payload_bytes} bytes for shape {record.shape} of {record.dtype}")
    return header
