# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vllm-neuron's device cache, `EncoderCacheBlocks`, and for a device that refuses eager writes.

Written from the contract, its faults included: `allocate` sleeps on the caller's thread and then raises, what is
there already is returned whatever was asked for, and `free` leaves the bytes where they are. Nothing of our own
packages is used, so that it cannot agree with them by sharing their mistakes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

SLEEP_STEP_SECONDS = 0.001
SPECIAL_WRITES = {
    "__setitem__",
    *(f"__i{each}__" for each in ("add", "sub", "mul", "div", "truediv", "and", "or", "xor")),
}


class DeviceTensor(torch.Tensor):
    """Memory of a device whose runtime refuses in-place writes, except by what its compiler made.

    Views are of this class too. What shares no memory with it, as a concatenation, is an ordinary tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what is traced here is a graph's own write, and nothing runs yet
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if any(isinstance(each, cls) for each in _written_by(name, args, kwargs)):
            raise RuntimeError(f"{name}: in-place writes into shared storage are not supported")
        if name in ("numpy", "__array__"):  # would be a way to write, and a device has none
            raise TypeError("a device tensor is not host memory: copy it with .cpu() first")
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.to, torch.Tensor.cpu):  # on the CPU these could be the same memory: never a device's
            return _plain(result).clone() if isinstance(result, cls) else result
        with torch._C.DisableTorchFunctionSubclass():
            memory = {_storage(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)}
            return tree_map(
                lambda each: _plain(each) if isinstance(each, cls) and _storage(each) not in memory else each, result
            )


def device_compiler(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A `backend` of `torch.compile` whose graphs may write, as inductor's may, which take seconds to make."""
    return lambda *inputs: graph(*[_plain(each) for each in inputs])


@dataclass
class _Entry:
    block_ids: list[int]
    tokens_per_block: list[int]
    write_time: float = 0.0
    """Monotonic milliseconds; 0.0: never marked as written, which counts as long ago."""


class EncoderCacheBlocks:
    """The plugin's device cache. Not a mapping."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fat_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        min_hold_time_ms: float = 0.0,
        *,
        refuse_eager_writes: bool = False,
    ) -> None:
        self.num_blocks, self.block_size, self.fat_dim, self.dtype = num_blocks, block_size, fat_dim, dtype
        self.min_hold_time_ms = min_hold_time_ms
        self.scratch_block_id = num_blocks - 1
        self.graph_memory = torch.zeros(num_blocks, block_size, fat_dim, dtype=dtype, device=device)
        """The stand-in's own way into `buffer`: for what a graph writes, and for tests. The real cache has no such."""
        self.buffer = self.graph_memory.as_subclass(DeviceTensor) if refuse_eager_writes else self.graph_memory
        self.slept_seconds = 0.0
        """For tests: what `allocate` has kept its callers waiting."""
        self._entries: dict[str, _Entry] = {}
        self._held: dict[str, _Entry] = {}
        self._free = deque(range(self.scratch_block_id))

    @staticmethod
    def dense_tokens_per_block(num_tokens: int, block_size: int) -> list[int]:
        full, rest = divmod(num_tokens, block_size)
        return [block_size] * full + [rest] * bool(rest)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, mm_hash: str, tokens_per_block: list[int]) -> list[int]:
        """Blocks for the item: those it has, whatever is asked for, or fresh ones. May sleep. Raises RuntimeError."""
        if mm_hash in self._entries:
            return list(self._entries[mm_hash].block_ids)
        if mm_hash in self._held:
            self._free.extend(self._held.pop(mm_hash).block_ids)
        needed = len(tokens_per_block)
        if needed > len(self._free):
            self.reclaim_held()
        self._wait_for(needed)
        if needed > len(self._free):
            raise RuntimeError(
                f"Encoder cache full: cannot allocate {needed} blocks for {mm_hash}, {len(self._free)} are free"
            )
        block_ids = [self._free.popleft() for _ in range(needed)]
        self._entries[mm_hash] = _Entry(block_ids, list(tokens_per_block))
        return list(block_ids)

    def _wait_for(self, needed: int) -> None:
        began = time.monotonic()
        while needed > len(self._free) and self._held:
            left = self.min_hold_time_ms / 1000 - (time.monotonic() - began)
            if left <= 0:
                break
            before = time.monotonic()
            time.sleep(min(SLEEP_STEP_SECONDS, left))
            self.slept_seconds += time.monotonic() - before
            self.reclaim_held()

    def mark_written(self, mm_hash: str) -> None:
        if mm_hash in self._entries:
            self._entries[mm_hash].write_time = _now_ms()

    def free(self, mm_hash: str) -> None:
        """Give the item's blocks back: at once, or behind the hold time of what was written lately."""
        entry = self._entries.pop(mm_hash, None)
        if entry is None:
            return
        if self._may_go(entry):
            self._free.extend(entry.block_ids)
        else:
            self._held[mm_hash] = entry

    def reclaim_held(self) -> None:
        """Put held blocks whose time is over into the free queue."""
        for mm_hash in [mm_hash for mm_hash, entry in self._held.items() if self._may_go(entry)]:
            self._free.extend(self._held.pop(mm_hash).block_ids)

    def _may_go(self, entry: _Entry) -> bool:
        return not entry.write_time or _now_ms() - entry.write_time >= self.min_hold_time_ms

    def contains(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def get_block_ids(self, mm_hash: str) -> list[int] | None:
        entry = self._entries.get(mm_hash)
        return None if entry is None else list(entry.block_ids)

    def get_tokens_per_block(self, mm_hash: str) -> list[int] | None:
        entry = self._entries.get(mm_hash)
        return None if entry is None else list(entry.tokens_per_block)

    def get_num_tokens(self, mm_hash: str) -> int | None:
        entry = self._entries.get(mm_hash)
        return None if entry is None else sum(entry.tokens_per_block)

    def get(self, mm_hash: str) -> torch.Tensor | None:
        """The item without its pads, `[num_tokens, fat_dim]`: a view if it lies in one block, else a copy."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            return None
        parts = [self.buffer[each, :n] for each, n in zip(entry.block_ids, entry.tokens_per_block, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Write an item densely, eagerly; nothing if it is there. Leaves an empty item where the write is refused."""
        if mm_hash in self._entries:
            return
        block_ids = self.allocate(mm_hash, self.dense_tokens_per_block(len(tensor), self.block_size))
        for block_id, rows in zip(block_ids, torch.split(tensor, self.block_size), strict=True):
            self.buffer[block_id, : len(rows)].copy_(rows)
        self.mark_written(mm_hash)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each hash with its dense tensor, as `get` gives it."""
        for mm_hash in list(self._entries):
            tensor = self.get(mm_hash)
            assert tensor is not None
            yield mm_hash, tensor

    def clear(self) -> None:
        """Drop every item, what is held too, and zero the buffer, in a way that the device takes."""
        self._entries.clear()
        self._held.clear()
        self._free = deque(range(self.scratch_block_id))
        self.graph_memory.zero_()


def _now_ms() -> float:
    return time.monotonic() * 1000


def _written_by(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function of that name writes into: by torch's custom, an underscore ends such a name."""
    in_place = name in SPECIAL_WRITES or (name.endswith("_") and not name.endswith("__"))
    targets = [args[0]] if in_place and args else []
    return tree_flatten((targets, kwargs.get("out")))[0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
