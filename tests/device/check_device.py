# SPDX-License-Identifier: Apache-2.0
"""Checks that need a device with streams: `python -m tests.device.check_device`; ends with 0, 1, or 2 without a device.

Each check raises AssertionError or returns one line of what it saw. All of them together take less than five minutes.
"""

import random
import sys
import time
import traceback
from collections.abc import Callable

import torch

from storage_tiers.device_copy import (
    BlockCopies,
    CompiledScatterCopies,
    EagerCopies,
    SideStreamCopies,
    copies_for,
)

__all__ = ["CHECKS", "NO_DEVICE", "device", "main"]

NO_DEVICE = "no device here: torch.cuda is not available"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH = 3584
BLOCK_SIZE = 256
CLIP_ROWS = 18249
"""130.8 MB of bfloat16."""
ROUNDS = 300


def device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def the_device_gets_a_side_stream(on: torch.device) -> str:
    copies = copies_for(torch.zeros(3, 2, 2, device=on))
    assert isinstance(copies, SideStreamCopies), type(copies).__name__
    return "auto is the side stream"


def all_strategies_leave_the_same_bytes(on: torch.device) -> str:
    """Pageable, pinned and device sources, rings that fit and rings that do not, tails, blocks in any order."""
    chance, layouts = random.Random(1), 40
    for number in range(layouts):
        dtype, width, block_size = chance.choice(DTYPES), chance.choice((1, 8, 264)), chance.choice((1, 4, 48))
        before = _random_bits(number, 20 * block_size, width, dtype).view(20, block_size, width)
        num_tokens = chance.randint(1, 19 * block_size)
        block_ids = chance.sample(range(19), -(-num_tokens // block_size))
        source = _random_bits(number + 1, num_tokens, width, dtype)
        expected = before.clone()
        EagerCopies(expected).write(block_ids, source)
        for ring_bytes in (0, 1 << 12, 1 << 24):
            for held in (source, source.pin_memory(), source.to(on)):
                buffer = before.to(on)
                copies = SideStreamCopies(buffer, ring_bytes)
                _agrees(copies, buffer, block_ids, held, expected)
        buffer = before.to(on)
        _agrees(EagerCopies(buffer), buffer, block_ids, source, expected)
    return f"side stream and eager: {layouts} layouts, every byte"


def a_compiled_scatter_leaves_the_same_bytes(on: torch.device) -> str:
    before = _random_bits(1, 40 * 16, 64, torch.bfloat16).view(40, 16, 64)
    buffer = before.to(on)
    started = time.perf_counter()
    copies = CompiledScatterCopies(buffer)
    compiling = time.perf_counter() - started
    for number, num_tokens in enumerate((1, 16, 127, 128, 129, 600)):
        block_ids = random.Random(number).sample(range(39), -(-num_tokens // 16))
        source = _random_bits(number, num_tokens, 64, torch.bfloat16)
        EagerCopies(before).write(block_ids, source)
        _agrees(copies, buffer, block_ids, source, before)
    return f"compiled in {compiling:.1f} s, 6 sizes, every byte"


def streams_keep_the_order(on: torch.device) -> str:
    """Blocks are written, used at once, overwritten by compute, read and given away, without the host waiting once."""
    buffer = torch.zeros(24, BLOCK_SIZE, WIDTH, dtype=torch.float32, device=on)
    copies = SideStreamCopies(buffer, staging_bytes=8 << 20)
    busy = torch.randn(2048, 2048, device=on)
    chance, pending = random.Random(2), []
    for number in range(ROUNDS):
        num_tokens = chance.randint(1, 4 * BLOCK_SIZE)
        block_ids = chance.sample(range(8), -(-num_tokens // BLOCK_SIZE))
        source = torch.full((num_tokens, WIDTH), float(number))
        source = source.pin_memory() if number % 2 else source
        for _ in range(chance.randint(0, 3)):
            busy = (busy @ busy).clamp_(-1, 1)  # what came before on the compute stream is still under way
        copies.write(block_ids, source)
        seen = buffer[block_ids].view(-1, WIDTH)[:num_tokens].amax(1) + buffer[block_ids].view(-1, WIDTH)[
            :num_tokens
        ].amin(1)
        buffer[block_ids] += 1
        target = torch.zeros(num_tokens, WIDTH, pin_memory=number % 3 == 0)
        copies.read(block_ids, num_tokens, target)
        buffer[block_ids] = -1.0
        pending.append((number, source, seen, target))
        if len(pending) == 30:
            _settled(copies, pending)
    _settled(copies, pending)
    return f"{ROUNDS} rounds of write, use, change, read, reuse"


def memory_that_is_registered_later_is_copied_directly(on: torch.device) -> str:
    """As the shared pool could be; where the driver refuses, the ring serves."""
    source = torch.randn(1024, 1024)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(source.data_ptr(), source.nbytes, 0))
    if code:
        return f"refused with code {code}: the pool goes through the pinned ring"
    try:
        assert source.is_pinned()
        buffer = torch.zeros(9, 128, 1024, device=on)
        copies = SideStreamCopies(buffer)
        copies.write(range(8), source)
        copies.synchronize()
        assert torch.equal(buffer[:8].view(-1, 1024).cpu(), source)
    finally:
        assert int(runtime.cudaHostUnregister(source.data_ptr())) == 0
    return "registered memory counts as pinned"


def bandwidth(on: torch.device) -> str:
    """130.8 MB each way, adjacent and scattered blocks; median of ten, in GB/s."""
    count = -(-CLIP_ROWS // BLOCK_SIZE)
    buffer = torch.zeros(2 * count + 1, BLOCK_SIZE, WIDTH, dtype=torch.bfloat16, device=on)
    pageable = _random_bits(3, CLIP_ROWS, WIDTH, torch.bfloat16)
    pinned = pageable.pin_memory()
    lines = []
    for copies in (EagerCopies(buffer), SideStreamCopies(buffer)):
        for layout, block_ids in (("adjacent", list(range(count))), ("scattered", list(range(0, 2 * count, 2)))):
            for kind, memory in (("pageable", pageable), ("pinned", pinned)):
                write = _gigabytes_per_second(copies, memory, lambda: copies.write(block_ids, memory))  # noqa: B023
                read = _gigabytes_per_second(copies, memory, lambda: copies.read(block_ids, CLIP_ROWS, memory))  # noqa: B023
                lines.append(f"{type(copies).__name__}, {layout}, {kind}: write {write:.1f}, read {read:.1f} GB/s")
    assert torch.equal(pageable.view(torch.uint8), pinned.view(torch.uint8)), "what was read back"
    return "\n    ".join(lines)


CHECKS: tuple[Callable[[torch.device], str], ...] = (
    the_device_gets_a_side_stream,
    all_strategies_leave_the_same_bytes,
    a_compiled_scatter_leaves_the_same_bytes,
    streams_keep_the_order,
    memory_that_is_registered_later_is_copied_directly,
    bandwidth,
)


def main() -> int:
    """Run all checks, say how each went, and return the exit status."""
    on = device()
    if on is None:
        print(NO_DEVICE)
        return 2
    failed = 0
    print(f"{torch.cuda.get_device_name(on)}, torch {torch.__version__}")
    for check in CHECKS:
        started = time.perf_counter()
        try:
            outcome = f"ok: {check(on)}"
        except Exception:  # noqa: BLE001 - one failed check does not end the others
            failed += 1
            outcome = f"FAILED\n{traceback.format_exc()}"
        print(f"  {check.__name__} ({time.perf_counter() - started:.1f} s) {outcome}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} device checks passed")
    return 1 if failed else 0


def _random_bits(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)


def _agrees(
    copies: BlockCopies, buffer: torch.Tensor, block_ids: list[int], source: torch.Tensor, expected: torch.Tensor
) -> None:
    """Write, compare all but the scratch block, and read back."""
    copies.write(block_ids, source)
    on_host = buffer.cpu()
    assert torch.equal(on_host[:-1].view(torch.uint8), expected[:-1].view(torch.uint8)), "the blocks differ"
    for pins in (False, True):
        target = torch.zeros(source.shape, dtype=source.dtype, pin_memory=pins)
        copies.read(block_ids, len(source), target)
        copies.synchronize()
        assert torch.equal(target.view(torch.uint8), source.cpu().view(torch.uint8)), "what was read differs"


def _settled(copies: BlockCopies, pending: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Wait, and compare what compute saw in the blocks and what was read from them after compute changed them."""
    copies.synchronize()
    for number, _, seen, target in pending:
        assert (seen.cpu() == 2 * number).all(), f"round {number}: compute saw other bytes than were written"
        assert (target == number + 1).all(), f"round {number}: read other bytes than compute left"
    pending.clear()


def _gigabytes_per_second(copies: BlockCopies, memory: torch.Tensor, work: Callable[[], None]) -> float:
    took = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        copies.synchronize()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return memory.nbytes / sorted(took)[len(took) // 2] / 1e9


if __name__ == "__main__":
    sys.exit(main())
