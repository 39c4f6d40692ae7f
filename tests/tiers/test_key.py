# SPDX-License-Identifier: Apache-2.0
"""Names: equal in every process and equal to LMCache's own, and nothing that a client chose passes for content."""

import hashlib
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, CacheEngineKey
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from storage_tiers.key import KeySpace, WantedItem, chunk_hash_of, dtype_name, dtype_named, is_content_hash

ROOT = Path(__file__).parents[2]
HEX64 = hashlib.sha256(b"an image").hexdigest()
HEX128 = hashlib.sha512(b"an image").hexdigest()
U64 = st.integers(0, 2**64 - 1)


def key_space(model: str = "acme/vision-1", dtype: torch.dtype = torch.bfloat16, namespace: str = "") -> KeySpace:
    return KeySpace(model, dtype, namespace)


# -- The 64-bit name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mm_hash", "expected"),
    [
        ("", 0xE3B0C44298FC1C14),
        ("abc", 0xBA7816BF8F01CFEA),
        ("kä", int.from_bytes(hashlib.sha256("kä".encode()).digest()[:8], "big")),
    ],
)
def test_the_64_bit_name_is_the_head_of_sha256(mm_hash: str, expected: int) -> None:
    assert chunk_hash_of(mm_hash) == expected


def test_names_are_the_same_in_every_process() -> None:
    program = (
        "import torch; from storage_tiers.key import *; k = KeySpace('a/b', torch.float16, 'n');"
        "w = WantedItem('some id', 5, 'image', 'f'); print(w.chunk_hash, k.file_name_of(w.chunk_hash))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    chunk_hash = chunk_hash_of("some id")
    expected = f"{chunk_hash} {key_space('a/b', torch.float16, 'n').file_name_of(chunk_hash)}"
    assert ran.stdout.splitlines()[-1] == expected


# -- LMCache's names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("namespace", ["", "team-a", "a/b"])
@pytest.mark.parametrize("chunk_hash", [0, 1, 0xABC, 2**63, 2**64 - 1])
def test_key_and_file_name_are_lmcache_s_own(dtype: torch.dtype, namespace: str, chunk_hash: int) -> None:
    keys = key_space(dtype=dtype, namespace=namespace)
    key = keys.key_of(chunk_hash)
    assert CacheEngineKey.from_string(key.to_string()) == key
    assert (key.world_size, key.worker_id, key.chunk_hash) == (1, 0, chunk_hash)
    backend = LocalDiskBackend.__new__(LocalDiskBackend)
    backend.path = "/cache"
    assert backend._key_to_path(key) == f"/cache/{keys.file_name_of(chunk_hash)}"


def test_a_file_name_by_hand() -> None:
    assert key_space().file_name_of(0xAB) == "acme-vision-1@1@0@ab@bfloat16.pt"
    assert key_space(namespace="n").file_name_of(0) == "n-acme-vision-1@1@0@0@bfloat16.pt"


@given(U64)
def test_a_file_name_gives_its_number_back(chunk_hash: int) -> None:
    keys = key_space()
    assert keys.chunk_hash_in(keys.file_name_of(chunk_hash)) == chunk_hash


@given(st.text(alphabet="0123456789abcdefABCDEFxg@.", max_size=20))
def test_only_what_is_named_so_is_taken_for_a_name(digits: str) -> None:
    """Every number has one name: no padding, no upper case, no more than 64 bits."""
    keys = key_space()
    name = f"acme-vision-1@1@0@{digits}@bfloat16.pt"
    found = keys.chunk_hash_in(name)
    assert found is None or keys.file_name_of(found) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "acme-vision-1@1@0@@bfloat16.pt",
        "acme-vision-1@1@0@ab@float16.pt",
        "acme-vision-1@2@0@ab@bfloat16.pt",
        "acme-vision-1@1@1@ab@bfloat16.pt",
        "acme-vision-2@1@0@ab@bfloat16.pt",
        "n-acme-vision-1@1@0@ab@bfloat16.pt",
        "acme-vision-1@1@0@ab@bfloat16.pt.tmp",
        "acme-vision-1@1@0@0ab@bfloat16.pt",
        "acme-vision-1@1@0@ab\n@bfloat16.pt",
        "acme-vision-1@1@0@10000000000000000@bfloat16.pt",
    ],
)
def test_a_name_of_another_space_is_none_of_ours(name: str) -> None:
    assert key_space().chunk_hash_in(name) is None


def test_two_namespaces_never_share(tmp_path: Path) -> None:
    spaces = [key_space(), key_space(namespace="a"), key_space(namespace="b"), key_space("acme/vision-2")]
    spaces.append(key_space(dtype=torch.float16))
    assert len({space.key_of(7) for space in spaces}) == len(spaces)
    assert len({space.file_name_of(7) for space in spaces}) == len(spaces)


@pytest.mark.parametrize("where", ["model", "namespace"])
def test_the_separator_of_keys_is_refused_in_names(where: str) -> None:
    with pytest.raises(ValueError, match="contains '@'"):
        key_space(**{where: "a@b"})


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.complex64 has no name"):
        key_space(dtype=torch.complex64)


def test_dtypes_go_by_lmcache_s_names() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8):
        assert dtype_named(dtype_name(dtype)) is dtype is STR_DTYPE_TO_TORCH_DTYPE[dtype_name(dtype)]
    assert dtype_named("no such dtype") is None


# -- Content hashes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mm_hash", [HEX64, HEX128, f"adapter:{HEX64}", f"a:b:{HEX128}"])
def test_what_vllm_computes_is_a_content_hash(mm_hash: str) -> None:
    assert is_content_hash(mm_hash)


@pytest.mark.parametrize(
    "mm_hash",
    ["", "my-picture", "image-0", HEX64[:-1], HEX64 + "\n", HEX64.upper(), f"{HEX64}:", f"{HEX64}:uuid", f"{HEX64}-0"],
)
def test_what_a_client_chose_is_none(mm_hash: str) -> None:
    assert not is_content_hash(mm_hash)


@pytest.mark.parametrize("mm_hash", [f"my-picture-{HEX64}", f"0{HEX64}", f"0{HEX128}", f"a:x{HEX64}"])
def test_what_merely_ends_like_a_digest_is_none_either(mm_hash: str) -> None:
    assert not is_content_hash(mm_hash)


# -- What is wanted ---------------------------------------------------------------------------------------------------


def test_wanted_items_are_equal_when_all_that_must_match_is() -> None:
    wanted = WantedItem("id", 5, "image", "f", 64)
    assert wanted == replace(wanted)
    assert wanted.chunk_hash == chunk_hash_of("id")
    assert hash(wanted) == hash(replace(wanted))
    for changes in (
        {"mm_hash": "other"},
        {"num_tokens": 6},
        {"modality": "video"},
        {"fingerprint": "g"},
        {"width": None},
    ):
        assert replace(wanted, **changes) != wanted
    assert replace(wanted, mm_hash="other").chunk_hash == chunk_hash_of("other")


def test_a_wanted_item_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        WantedItem("id", 5, "image", "f").num_tokens = 6  # type: ignore[misc]
