# SPDX-License-Identifier: Apache-2.0
"""How the device's encoder cache is cut into blocks: one answer for the scheduler, who counts, and the workers.

Sizes and their checks only: no buffer, no tensor and no item may enter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connector.lmcache_config import SettingsError
from connector.settings import BehaviourSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["BlockGeometry", "geometry_for", "geometry_of"]

ATTENTION_BLOCK_KEY = "vision_attention_block_size"
NUM_BLOCKS_KEY = "encoder_cache_num_blocks"


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Blocks of a fixed size, one item per block."""

    block_size: int
    """Tokens of one block."""
    num_blocks: int
    """All blocks, the last of which is scratch and never holds an item."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can hold items."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one item of `num_tokens` takes."""
        return -(-num_tokens // self.block_size)


def geometry_for(
    *, block_size: int, num_blocks: int | None, encoder_cache_size: int, max_item_tokens: int | None
) -> BlockGeometry:
    """Blocks of `block_size` tokens: `num_blocks` with the scratch block, or enough for `encoder_cache_size` tokens.

    `max_item_tokens` is the size of the largest item, None where nobody knows. Raises SettingsError for a block size
    below 1, and for fewer blocks than the largest item needs.
    """
    if block_size < 1:
        raise SettingsError(f"device_block_size = {block_size} cannot be used; allowed is an integer and at least 1")
    # An engine without multimodal inputs has a cache of size 0, and needs no block.
    largest = max_item_tokens if max_item_tokens is not None else min(1, encoder_cache_size)
    origin = ""
    if num_blocks is None:
        num_blocks = -(-encoder_cache_size // block_size) + 1
        origin = f" (from an encoder cache size of {encoder_cache_size} tokens)"
    geometry = BlockGeometry(block_size, num_blocks)
    needed = geometry.blocks_for(largest) + 1
    if num_blocks < needed:
        raise SettingsError(
            f"device_num_blocks = {num_blocks}{origin} cannot be used: the largest item has {largest} tokens, "
            f"which with device_block_size = {block_size} and the scratch block takes {needed} blocks; allowed is "
            f"{needed} or more"
        )
    return geometry


def geometry_of(vllm_config: "VllmConfig", behaviour: BehaviourSettings, encoder_cache_size: int) -> BlockGeometry:
    """The geometry of this engine. `encoder_cache_size` is the scheduler's budget, in tokens.

    What vllm-neuron's own options in `additional_config` say of its blocks counts before the defaults here. Raises
    SettingsError for what `geometry_for` refuses, and for sizes that are not the plugin's.
    """
    block_size = _plugin_block_size(vllm_config, behaviour) or behaviour.device_block_size
    num_blocks = _plugin_num_blocks(vllm_config, behaviour, -(-encoder_cache_size // block_size) + 1)
    largest = None
    # vLLM makes its budget no smaller than the largest item, so that blocks for all of it hold that item.
    if num_blocks is not None and (num_blocks - 1) * block_size < encoder_cache_size:
        largest = _largest_item_tokens(vllm_config, encoder_cache_size)
    return geometry_for(
        block_size=block_size,
        num_blocks=num_blocks,
        encoder_cache_size=encoder_cache_size,
        max_item_tokens=largest,
    )


def _largest_item_tokens(vllm_config: "VllmConfig", encoder_cache_size: int) -> int | None:
    """Tokens of the largest item that the engine admits, as vLLM's own budget has them; takes a second or so."""
    if encoder_cache_size > vllm_config.scheduler_config.encoder_cache_size:
        return encoder_cache_size  # It is larger than was set only because of that item.
    from connector.vllm_versions import largest_item_tokens  # vLLM itself, which planning sizes does without

    return largest_item_tokens(vllm_config)


def _plugin_block_size(vllm_config: "VllmConfig", behaviour: BehaviourSettings) -> int | None:
    """Tokens of a block under vllm-neuron, whose encoder writes its attention blocks, merged, straight into the cache.

    None where the plugin's options do not tell. Raises SettingsError where the user has set another size.
    """
    attention_block = next(_values_of(ATTENTION_BLOCK_KEY, vllm_config.additional_config), None)
    if attention_block is None:
        return None
    vision = getattr(vllm_config.model_config.hf_config, "vision_config", None)
    merge_size = getattr(vision, "spatial_merge_size", None)
    if merge_size is None:
        return None  # What the encoder makes of an attention block is not known.
    merged = int(attention_block // merge_size**2)
    block_size = behaviour.device_block_size
    if "device_block_size" in behaviour.model_fields_set and block_size != merged:
        raise SettingsError(
            f"device_block_size = {block_size} does not fit {ATTENTION_BLOCK_KEY} = {attention_block} (from "
            f"additional_config): the encoder merges {merge_size**2} patches into a token and fills blocks of {merged} "
            f"tokens; set device_block_size to {merged}, or {ATTENTION_BLOCK_KEY} to {block_size * merge_size**2}"
        )
    return merged


def _plugin_num_blocks(vllm_config: "VllmConfig", behaviour: BehaviourSettings, least: int) -> int | None:
    """Blocks that are set, None for as many as the budget needs. vllm-neuron makes no fewer than `least`.

    Raises SettingsError where the plugin and `device_num_blocks` say different things.
    """
    configured = next(_values_of(NUM_BLOCKS_KEY, vllm_config.additional_config), None)
    if configured is None:
        return behaviour.device_num_blocks
    made = max(configured, least)
    if behaviour.device_num_blocks not in (None, made):
        raise SettingsError(
            f"device_num_blocks = {behaviour.device_num_blocks} is not what vllm-neuron makes with {NUM_BLOCKS_KEY} = "
            f"{configured} (from additional_config), which is {made}: leave device_num_blocks unset"
        )
    return made


def _values_of(key: str, tree: Any) -> Iterator[int]:
    """Integers under `key` in `tree`, the outermost first."""
    if not isinstance(tree, Mapping):
        return
    if isinstance(tree.get(key), int):
        yield tree[key]
    for branch in tree.values():
        yield from _values_of(key, branch)
