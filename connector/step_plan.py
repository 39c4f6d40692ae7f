# SPDX-License-Identifier: Apache-2.0
"""The plan of one step: the only thing that crosses from the scheduler's side to the workers'.

Plain values that pickle small. No handle, no tensor and no decision may enter: a plan says what to copy where.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

__all__ = ["LoadMapping", "NothingToLoad", "StepPlan", "Transfer"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy between a worker's encoder cache and the shared pool."""

    slot: int
    """The transfer's id, and its row in the transfer board."""
    mm_hash: str
    offset: int
    """Bytes from the start of the shared segment to the payload."""
    num_tokens: int
    width: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """`[num_tokens, width]`."""
        return (self.num_tokens, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.num_tokens * self.width * self.dtype.itemsize


class LoadMapping(dict[str, dict[str, Any]]):
    """What vllm-neuron's runner reads of a plan: per `mm_hash` its `num_tokens`; it adds `local_block_ids`.

    True also when it is empty and `has_saves`: only a true one makes that runner call the connector.
    """

    has_saves: bool = False

    def __bool__(self) -> bool:
        return self.has_saves or len(self) > 0


class NothingToLoad(ECConnectorMetadata):
    """What vllm-neuron's runner is given when a worker hook has carried out the plan."""

    load = LoadMapping()


@dataclass(slots=True)
class StepPlan(ECConnectorMetadata):
    """What the workers of one engine do for the encoder cache in one step."""

    number: int
    """Counts up by one per plan; a worker reports the last one it has carried out."""
    segment: str
    """Name of the shared segment, for workers that have not attached yet."""
    loads: tuple[Transfer, ...] = field(default=())
    """Pool to encoder cache, before the model runs, by every participating rank."""
    saves: tuple[Transfer, ...] = field(default=())
    """Encoder cache to pool, after the encoder has run, by rank 0."""
    _load: LoadMapping | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def load(self) -> LoadMapping:
        """The same for vllm-neuron's runner, which writes into it. Made when it is first asked for."""
        if self._load is None:
            self._load = LoadMapping((load.mm_hash, {"num_tokens": load.num_tokens}) for load in self.loads)
            self._load.has_saves = bool(self.saves)
        return self._load
