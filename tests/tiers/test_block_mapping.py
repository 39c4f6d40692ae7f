# SPDX-License-Identifier: Apache-2.0
"""The runner's encoder cache over blocks: a dict to vLLM, whatever is put into it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from storage_tiers.block_mapping import BlockMapping
from storage_tiers.device_blocks import DeviceBlockCache
from storage_tiers.faults import FaultLog

WIDTH = 3
CPU = torch.device("cpu")


def rows(num_tokens: int, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def mapping() -> BlockMapping:
    def make(width: int, dtype: torch.dtype) -> DeviceBlockCache:
        return DeviceBlockCache(5, 4, width, dtype=dtype)

    return BlockMapping(make, FaultLog())


def test_it_behaves_as_a_dict(mapping: BlockMapping) -> None:
    a, b = rows(5), rows(7, seed=1)
    mapping["a"] = a
    assert mapping.get("b") is None
    mapping["b"] = b
    assert set(mapping) == {"a", "b"} == mapping.keys()
    assert len(mapping) == 2
    assert torch.equal(mapping["a"], a)
    assert torch.equal(mapping["b"], b)
    assert mapping.pop("absent", None) is None
    assert torch.equal(mapping.pop("a"), a)
    with pytest.raises(KeyError):
        del mapping["a"]
    mapping.clear()
    assert not mapping
    assert mapping.blocks is not None
    assert mapping.blocks.num_free_blocks == 4


def test_the_first_item_decides_width_and_dtype(mapping: BlockMapping) -> None:
    assert mapping.blocks is None
    mapping["tmp_0"] = rows(4, 7).bfloat16()
    assert mapping.blocks is not None
    assert (mapping.blocks.fat_dim, mapping.blocks.dtype) == (7, torch.bfloat16)


def test_profiling_items_beyond_the_cache_are_taken_as_plain_tensors(mapping: BlockMapping) -> None:
    for number in range(10):
        mapping[f"tmp_{number}"] = rows(5, seed=number)
    assert len(mapping) == 10
    assert all(torch.equal(mapping[f"tmp_{number}"], rows(5, seed=number)) for number in range(10))
    assert mapping.counts == {"no_free_blocks": 8}


@pytest.mark.parametrize(
    ("item", "reason"), [(rows(17), "larger_than_cache"), (rows(2, 5), "other_width"), (rows(2).half(), "other_width")]
)
def test_what_fits_no_block_is_kept_as_it_is_and_counted(
    mapping: BlockMapping, item: torch.Tensor, reason: str
) -> None:
    mapping["first"] = rows(1)
    mapping["odd"] = item
    assert mapping["odd"] is item
    assert mapping.counts == {reason: 1}
    del mapping["odd"]
    assert list(mapping) == ["first"]


def test_a_load_goes_straight_into_blocks(mapping: BlockMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping["first"] = rows(1)
    monkeypatch.setattr(torch, "empty", partial(pytest.fail, "an intermediate tensor"))
    mapping.load("a", rows(9, seed=3), CPU)
    assert torch.equal(mapping["a"], rows(9, seed=3))


def test_a_load_without_free_blocks_lives_as_a_plain_tensor(mapping: BlockMapping) -> None:
    mapping["a"] = rows(16)
    source = rows(9, seed=3)
    mapping.load("b", source, CPU)
    loaded = mapping["b"].clone()
    source.zero_()  # the pool's memory goes to another item
    assert torch.equal(mapping["b"], loaded)


def test_a_source_outlives_its_item_until_it_is_released(mapping: BlockMapping) -> None:
    a = rows(16, seed=1)
    mapping["a"] = a
    source = mapping.source_of("a")
    assert source.in_blocks
    mapping.discard("a")
    mapping["b"] = rows(16, seed=2)
    assert torch.equal(torch.cat(source.views), a)
    source.release()
    mapping["c"] = rows(16, seed=3)
    assert mapping.blocks is not None
    assert mapping.blocks.contains("c")


def test_a_plain_item_is_a_source_as_well(mapping: BlockMapping) -> None:
    mapping["first"] = rows(1)
    mapping["odd"] = rows(2, 5)
    source = mapping.source_of("odd")
    assert not source.in_blocks
    assert torch.equal(source.views[0], rows(2, 5))


def test_replacing_an_item_leaves_no_second_copy(mapping: BlockMapping) -> None:
    mapping["a"] = rows(16)
    mapping["a"] = rows(17)  # outside of blocks now
    assert len(mapping) == 1
    mapping["a"] = rows(3, seed=5)
    assert len(mapping) == 1
    assert torch.equal(mapping["a"], rows(3, seed=5))
