# SPDX-License-Identifier: Apache-2.0
"""Copies between blocks of a device buffer and dense rows in host memory, in the way that the device allows.

This room knows tensors and streams. Who owns a block, what an item is called and when it may move must not enter, nor
may the layout of the pool: a source or target is a tensor `[num_tokens, fat_dim]` like any other.

All strategies leave the same bytes in the blocks that were written. Only the scratch block, the last, may differ.
"""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, get_args

import torch

__all__ = [
    "BlockCopies",
    "CompiledScatterCopies",
    "EagerCopies",
    "SideStreamCopies",
    "Strategy",
    "adjacent_runs",
    "copies_for",
]

Strategy = Literal["auto", "eager", "side_stream", "compiled_scatter"]
CompilerBackend = str | Callable[..., Any]
"""What `torch.compile` takes for `backend`."""

BLOCKS_PER_CALL = 8
STAGING_BYTES = 32 << 20
_SLOTS = 4
"""Of the pinned ring: the host fills one while the device still reads others."""


def adjacent_runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """`(first block, count)` of each run of adjacent ascending blocks, in the order of `block_ids`."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and sum(runs[-1]) == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs


class BlockCopies(ABC):
    """Fills blocks of one buffer and reads them back. For the thread that issues the device's work, and only for it.

    Work issued to the current stream before a call has its effect before the copy, work issued after it finds the copy
    done. The host is told by `synchronize`: until then `source` may still be read and `target` still be written.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer` is `[num_blocks, block_size, fat_dim]`, its last block scratch. Raises ValueError for another."""
        if buffer.dim() != 3 or buffer.shape[0] < 2 or not buffer.is_contiguous():
            raise ValueError(
                "the buffer must be contiguous, [num_blocks, block_size, fat_dim] with two blocks or more, "
                f"and is {list(buffer.shape)} with strides {buffer.stride()}"
            )
        self._buffer = buffer
        self._num_blocks, self._block_size, self._fat_dim = buffer.shape
        self._scratch = self._num_blocks - 1

    def write(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Fill blocks densely: row i of `source` goes to row `i % block_size` of block `block_ids[i // block_size]`.

        `source` is `[num_tokens, fat_dim]` in host memory, or on the buffer's device. Rows behind the last token are
        zeroed. Raises ValueError for another width or dtype than the buffer's, and for blocks that are not exactly as
        many as the tokens need, not the buffer's, scratch or named twice; RuntimeError where the device fails.
        """
        self._check(block_ids, source)
        with torch.inference_mode():  # of the buffer and of what the encoder made, either may be an inference tensor
            self._write(block_ids, source)

    def read(self, block_ids: Sequence[int], num_tokens: int, target: torch.Tensor) -> None:
        """The reverse of `write`, into `target`, `[num_tokens, fat_dim]` in host memory. Raises as `write` does.

        An item with pads inside is read block by block, each into its part of `target`.
        """
        if target.shape[:1] != (num_tokens,):
            raise ValueError(f"the target must have {num_tokens} rows and is {list(target.shape)}")
        self._check(block_ids, target)
        with torch.inference_mode():
            self._read(block_ids, target)

    def synchronize(self) -> None:
        """Wait on the host until every copy so far has ended. Nothing is left to wait for unless a strategy says so."""
        return

    @abstractmethod
    def _write(self, block_ids: Sequence[int], source: torch.Tensor) -> None: ...

    def _read(self, block_ids: Sequence[int], target: torch.Tensor) -> None:
        for rows, part in self._stretches(block_ids, target):
            part.copy_(rows[: len(part)])

    def _stretches(self, block_ids: Sequence[int], dense: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each run of blocks its rows, `[count * block_size, fat_dim]`, and the part of `dense` they hold: views.

        Only the last part may have fewer rows than its blocks.
        """
        start = 0
        for first, count in adjacent_runs(block_ids):
            rows = self._buffer[first : first + count].view(-1, self._fat_dim)
            yield rows, dense[start : start + len(rows)]
            start += len(rows)

    def _check(self, block_ids: Sequence[int], dense: torch.Tensor) -> None:
        if dense.dim() != 2 or dense.shape[1] != self._fat_dim or dense.dtype != self._buffer.dtype:
            raise ValueError(
                f"the blocks hold rows of {self._fat_dim} {self._buffer.dtype}, "
                f"not a tensor {list(dense.shape)} of {dense.dtype}"
            )
        needed = -(-len(dense) // self._block_size)
        if len(block_ids) != needed:
            raise ValueError(
                f"{len(dense)} tokens in blocks of {self._block_size} take {needed} blocks, not {len(block_ids)}"
            )
        strange = [block_id for block_id in block_ids if not 0 <= block_id < self._scratch]
        if strange or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"blocks must be distinct and within 0 to {self._scratch - 1}: {list(block_ids)}")


class EagerCopies(BlockCopies):
    """One copy for each run of adjacent blocks, on the current stream; the host waits for it."""

    def _write(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        for rows, part in self._stretches(block_ids, source):
            if len(part) == len(rows):
                rows.copy_(part)  # without more views: scattered blocks come through here by the dozen
            else:
                rows[: len(part)].copy_(part)
                rows[len(part) :].zero_()


@dataclass(slots=True)
class _Slot:
    """One part of the pinned ring."""

    rows: torch.Tensor
    """`[slot rows, fat_dim]`, pinned."""
    passed: torch.Event
    in_flight: bool = False
    """The device reads or writes `rows` until `passed`."""
    landing: torch.Tensor | None = None
    """Host memory that is to get the first of `rows`, once they have come."""


class SideStreamCopies(BlockCopies):
    """Copies on a stream of their own, from and to pinned memory, so that neither host nor copy engine idles.

    Pinned memory is copied directly: it must stay as it is until `synchronize`. Anything else passes through a pinned
    ring of bounded size: when `write` returns, such a source may change. Both streams wait for each other around every
    call, so a block may be written, used and given away at once. An item larger than the ring makes the host wait for
    work that was issued earlier.
    """

    def __init__(self, buffer: torch.Tensor, staging_bytes: int = STAGING_BYTES) -> None:
        """`staging_bytes` is the size of the ring, at least a row for each slot.

        Raises ValueError where the device has no streams or no pinned memory.
        """
        super().__init__(buffer)
        if not _has_streams(buffer.device):
            raise ValueError(f"device {str(buffer.device)!r} has no streams with pinned memory; 'eager' needs none")
        self._side = torch.Stream(device=buffer.device)
        row_bytes = self._fat_dim * buffer.dtype.itemsize
        self._slot_rows = max(1, staging_bytes // (_SLOTS * row_bytes))
        self._ring = deque(
            _Slot(_pinned((self._slot_rows, self._fat_dim), buffer.dtype), torch.Event(device=buffer.device))
            for _ in range(_SLOTS)
        )

    def synchronize(self) -> None:
        """Wait on the host until every copy so far has ended, and all targets hold what was read."""
        with torch.inference_mode():
            for slot in self._ring:  # oldest first
                _drain(slot)
        self._side.synchronize()

    def _write(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        with self._between_compute():
            for rows, part in self._stretches(block_ids, source):
                self._upload(rows[: len(part)], part)
                rows[len(part) :].zero_()

    def _read(self, block_ids: Sequence[int], target: torch.Tensor) -> None:
        with self._between_compute():
            for rows, part in self._stretches(block_ids, target):
                self._download(rows[: len(part)], part)

    @contextlib.contextmanager
    def _between_compute(self) -> Iterator[None]:
        """Run the block on the side stream, after the work that was issued so far and before what follows."""
        compute = torch.accelerator.current_stream(self._buffer.device)
        self._side.wait_stream(compute)
        try:
            with self._side:
                yield
        finally:  # also after half a copy: what follows may write the same blocks
            compute.wait_stream(self._side)

    def _upload(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        if _is_within_reach(part):
            rows.copy_(part, non_blocking=True)
            return
        for into, piece in zip(torch.split(rows, self._slot_rows), torch.split(part, self._slot_rows), strict=True):
            slot = self._next_slot()
            slot.rows[: len(piece)].copy_(piece)
            into.copy_(slot.rows[: len(piece)], non_blocking=True)
            self._sent(slot)

    def _download(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        if _is_within_reach(part):
            part.copy_(rows, non_blocking=True)
            return
        for out_of, piece in zip(torch.split(rows, self._slot_rows), torch.split(part, self._slot_rows), strict=True):
            slot = self._next_slot()
            slot.rows[: len(piece)].copy_(out_of, non_blocking=True)
            slot.landing = piece
            self._sent(slot)

    def _next_slot(self) -> _Slot:
        """The oldest slot, free."""
        slot = self._ring[0]
        self._ring.rotate(-1)
        _drain(slot)
        return slot

    def _sent(self, slot: _Slot) -> None:
        slot.passed.record(self._side)
        slot.in_flight = True


class CompiledScatterCopies(BlockCopies):
    """One compiled graph writes a fixed number of blocks, for devices that refuse eager writes into the buffer.

    What an item does not fill goes to the scratch block. A group that the item fills goes to the device straight from
    `source`, the last one by way of host memory of the size of one group. Reading is eager: devices allow that.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        blocks_per_call: int = BLOCKS_PER_CALL,
        backend: CompilerBackend = "inductor",
    ) -> None:
        """Compiles at once, and never again: seconds on a CPU, more elsewhere.

        Raises ValueError for fewer than one block per call, RuntimeError when `backend` cannot compile or run it.
        """
        super().__init__(buffer)
        if blocks_per_call < 1:
            raise ValueError(f"blocks_per_call must be 1 or more, not {blocks_per_call}")
        self._blocks_per_call = blocks_per_call
        # The compiler keeps graphs by code object and gives up at eight: each buffer brings a code object of its own.
        scatter = FunctionType(_scatter.__code__.replace(), globals())
        self._scatter = torch.compile(scatter, fullgraph=True, dynamic=False, backend=backend)
        with torch.inference_mode():  # as in every later call, since the compiler tells the two kinds of tensors apart
            self._staging = torch.zeros(blocks_per_call, self._block_size, self._fat_dim, dtype=buffer.dtype)
            self._call([], self._staging)

    def _write(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        groups = torch.split(source, self._blocks_per_call * self._block_size)
        for number, rows in enumerate(groups):
            first = number * self._blocks_per_call
            self._call(block_ids[first : first + self._blocks_per_call], self._shaped(rows))

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with zeros behind them as `[blocks_per_call, block_size, fat_dim]`; a view if none is missing."""
        if len(rows) == self._blocks_per_call * self._block_size:
            return rows.reshape(self._staging.shape)
        flat = self._staging.view(-1, self._fat_dim)
        flat[: len(rows)].copy_(rows)
        flat[len(rows) :].zero_()
        return self._staging

    def _call(self, block_ids: Sequence[int], values: torch.Tensor) -> None:
        padding = [self._scratch] * (self._blocks_per_call - len(block_ids))
        ids = torch.tensor([*block_ids, *padding], dtype=torch.int64).to(self._buffer.device)
        # A copy on the CPU too: views of whatever tensor an item lies in would be other kinds of input to the compiler.
        self._scatter(self._buffer, ids, values.to(self._buffer.device, copy=True))


def copies_for(
    buffer: torch.Tensor,
    strategy: Strategy = "auto",
    *,
    blocks_per_call: int = BLOCKS_PER_CALL,
    backend: CompilerBackend = "inductor",
) -> BlockCopies:
    """The strategy named, or the best that the buffer's device can do; tries a write to the scratch block.

    `blocks_per_call` and `backend` are the compiled scatter's. Raises ValueError for an unknown strategy and for one
    that the device cannot do, naming what would do, and RuntimeError where the compiled scatter cannot be compiled.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"unknown strategy {strategy!r}: one of {', '.join(get_args(Strategy))}")
    eager = EagerCopies(buffer)
    takes_writes = _takes_eager_writes(buffer)
    best: Strategy = "compiled_scatter"
    if takes_writes:
        best = "side_stream" if _has_streams(buffer.device) else "eager"
    chosen = best if strategy == "auto" else strategy
    if chosen == "compiled_scatter":
        return CompiledScatterCopies(buffer, blocks_per_call, backend)
    if not takes_writes:
        raise ValueError(f"{chosen!r}: device {str(buffer.device)!r} refuses eager writes; {best!r} would do")
    if chosen == "side_stream" and best != "side_stream":
        raise ValueError(
            f"{chosen!r}: device {str(buffer.device)!r} has no streams with pinned memory; {best!r} would do"
        )
    return SideStreamCopies(buffer) if chosen == "side_stream" else eager


def _scatter(buffer: torch.Tensor, block_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Compiled: the buffer is both input and output, so the graph writes it in place."""
    buffer.index_copy_(0, block_ids, values)


def _takes_eager_writes(buffer: torch.Tensor) -> bool:
    """Whether an eager write into the scratch block works: a device may refuse it, or take it and do nothing."""
    scratch = buffer[-1:].view(-1, buffer.shape[-1])
    with torch.inference_mode():
        try:
            scratch.copy_(torch.ones(scratch.shape, dtype=buffer.dtype))
            arrived = bool((scratch.to("cpu") == 1).all())
            scratch.zero_()
        except RuntimeError:  # NotImplementedError is one
            return False
    return arrived


def _has_streams(device: torch.device) -> bool:
    """Whether torch's generic streams, events and pinned memory work there."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        torch.Stream(device=device)
        torch.Event(device=device)
        return _pinned((1, 1), torch.uint8).is_pinned()
    except RuntimeError:
        return False


def _pinned(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _is_within_reach(dense: torch.Tensor) -> bool:
    """Whether the device copies to or from there by itself; true of memory that was registered later, too."""
    return dense.device.type != "cpu" or dense.is_pinned()


def _drain(slot: _Slot) -> None:
    """Wait until the device has done with `slot`, and pass on what it brought."""
    if slot.in_flight:
        slot.passed.synchronize()
        slot.in_flight = False
    if slot.landing is not None:
        slot.landing.copy_(slot.rows[: len(slot.landing)])
        slot.landing = None
