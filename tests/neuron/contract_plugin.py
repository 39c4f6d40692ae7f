# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vllm-neuron's model runner and worker: what a connector meets there, and no model.

Written from the contract, faults included: a failed load and a full cache end the engine, an item that the plan does
not load is skipped without a word, and a step without prompt tokens calls no connector. What the real engine would
have swallowed is compared bit by bit, or noted in `unfilled`. Nothing of our own `connector` is imported, so that
the two can agree only by way of the contract.
"""

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from tests.neuron.contract_cache import EncoderCacheBlocks
from tests.scheduler.items import encode, pixels_of, seed_of

if TYPE_CHECKING:
    from tests.scheduler.runner import Told  # whose module imports our connector

SAMPLED_TOKEN = 3
MERGE_FACTOR = 4


class ECLoadFailure(RuntimeError):  # noqa: N818 - the plugin's name
    """The connector told of items that it could not load: the engine dies."""


@dataclass
class _Request:
    features: list[MultiModalFeatureSpec]
    prompt_tokens: int
    adapter: Any
    computed: int
    sampled: int = 0


def frame_tokens_of(feature: MultiModalFeatureSpec) -> int:
    """Embeddings in one frame of a video. Raises ValueError where its grid and its placeholders do not agree."""
    assert feature.data is not None
    frames, height, width = feature.data["video_grid_thw"].data.tolist()
    frame_tokens = height * width // MERGE_FACTOR
    num_tokens = feature.mm_position.get_num_embeds()
    if frames * frame_tokens != num_tokens:
        raise ValueError(f"{frames} frames of {frame_tokens} tokens are not {num_tokens} placeholders")
    return frame_tokens


def frame_tokens_per_block(num_tokens: int, frame_tokens: int, block_size: int) -> list[int]:
    """How a video lies in blocks: no frame in two of them. Raises ValueError for a frame larger than a block."""
    if frame_tokens > block_size:
        raise ValueError(f"a frame of {frame_tokens} tokens does not fit into a block of {block_size}")
    return EncoderCacheBlocks.dense_tokens_per_block(num_tokens, block_size // frame_tokens * frame_tokens)


class ContractRunner:
    """One rank."""

    def __init__(
        self,
        connector: Any,
        told: "Told",
        cache: EncoderCacheBlocks,
        *,
        is_producer: bool,
        is_consumer: bool,
        rank: int = 0,
        copies_metadata: bool = True,
        frame_tokens: Callable[[MultiModalFeatureSpec], int] = frame_tokens_of,
    ) -> None:
        """Registers the buffer with the connector; None for an engine without one.

        `copies_metadata=False` is the `uni` executor: the connector gets the scheduler's own object.
        """
        self.connector = connector
        self.encoder_cache = cache
        self.encoded: Counter[str] = Counter()
        """Runs of the encoder by identifier."""
        self.gathered: list[tuple[str, str]] = []
        """Request and identifier of each item whose rows went into the language model, in order."""
        self.unfilled: list[tuple[str, str]] = []
        """The same of items that were not in the cache then: the real engine answers as if nothing were amiss."""
        self._told = told
        self._is_producer, self._is_consumer = is_producer, is_consumer
        self._copies_metadata = copies_metadata
        self._frame_tokens = frame_tokens
        self._requests: dict[str, _Request] = {}
        if connector is not None:
            connector.register_and_serve(cache.buffer, tp_rank=rank)

    def reset_encoder_cache(self) -> None:
        self.encoder_cache.clear()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Raises RuntimeError where the engine would die, and AssertionError for wrong rows."""
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        samples = self._is_consumer or not self._is_producer
        if self._is_prefill(scheduler_output):
            self._encode(scheduler_output)
            if self._is_consumer:
                self._start_loads(scheduler_output.ec_connector_metadata)
            if samples:
                self._wait_for_loads()
                self._gather(scheduler_output)
        return self._model_output(scheduler_output, samples)

    def _update_states(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for mm_hash in output.free_encoder_mm_hashes:
            self.encoder_cache.free(mm_hash)
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
            assert prompt is not None
            self._requests[new.req_id] = _Request(
                new.mm_features, len(prompt), new.lora_request, new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request_id].computed = computed

    def _is_prefill(self, output: SchedulerOutput) -> bool:
        requests = [self._requests[request_id] for request_id in output.num_scheduled_tokens]
        return any(request.computed < request.prompt_tokens for request in requests)

    # -- The encoder ------------------------------------------------------------------------------------------------

    def _encode(self, output: SchedulerOutput) -> None:
        for request_id, indices in output.scheduled_encoder_inputs.items():
            request = self._requests[request_id]
            for index in indices:
                feature = request.features[index]
                if feature.data is None or self.encoder_cache.contains(feature.identifier):
                    continue
                seed = pixels_of(feature.data)
                if seed is None:
                    raise RuntimeError(f"the encoder was given {feature.identifier} without pixels: the engine dies")
                num_tokens = feature.mm_position.get_num_embeds()
                rows = encode(seed, num_tokens, feature.modality, _path(request), self._told.weights)
                self._write_in_graph(feature, rows)
                self.encoder_cache.mark_written(feature.identifier)
                self.encoded[feature.identifier] += 1

    def _write_in_graph(self, feature: MultiModalFeatureSpec, rows: torch.Tensor) -> None:
        """What the model itself does. Pads get NaNs, so that it shows if somebody takes them for rows."""
        cache, size = self.encoder_cache, self.encoder_cache.block_size
        if feature.modality == "video":
            tokens_per_block = frame_tokens_per_block(len(rows), self._frame_tokens(feature), size)
        else:
            tokens_per_block = cache.dense_tokens_per_block(len(rows), size)
        block_ids = cache.allocate(feature.identifier, tokens_per_block)
        for block_id, part in zip(block_ids, torch.split(rows, tokens_per_block), strict=True):
            cache.graph_memory[block_id, : len(part)] = part
            cache.graph_memory[block_id, len(part) :] = float("nan")

    # -- The connector ----------------------------------------------------------------------------------------------

    def _start_loads(self, metadata: Any) -> None:
        if self._copies_metadata:
            metadata = pickle.loads(pickle.dumps(metadata))
        cache = self.encoder_cache
        self.connector.bind_connector_metadata(metadata)
        if metadata.load:
            for mm_hash, entry in metadata.load.items():
                tokens_per_block = cache.dense_tokens_per_block(entry["num_tokens"], cache.block_size)
                entry["local_block_ids"] = cache.allocate(mm_hash, tokens_per_block)
            self.connector.start_load_caches(cache, metadata=metadata)
        self.connector.clear_connector_metadata()

    def _wait_for_loads(self) -> None:
        if self.connector is not None and (failed := self.connector.wait_for_load()):
            raise ECLoadFailure(f"not loaded: {', '.join(sorted(failed))}: the engine dies")

    # -- The language model -----------------------------------------------------------------------------------------

    def _gather(self, output: SchedulerOutput) -> None:
        num_tokens, first = output.total_num_scheduled_tokens, 0
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            for index, feature in enumerate(request.features):
                placeholders = _placeholders(feature) - request.computed
                inside = (placeholders >= 0) & (placeholders < num_scheduled)
                if not inside.any():
                    continue
                if not self.encoder_cache.contains(feature.identifier):
                    self.unfilled.append((request_id, feature.identifier))
                    continue
                positions = torch.where(inside, placeholders + first, num_tokens)
                merged = self._merge(feature.identifier, positions, num_tokens)
                image = self._told.images[request_id][index]
                right = encode(seed_of(image.picture), image.rows, image.modality, _path(request), self._told.weights)
                assert torch.equal(merged[positions[inside]], right[inside]), f"{request_id} got wrong rows of {image}"
                self.gathered.append((request_id, feature.identifier))
            first += num_scheduled

    def _merge(self, mm_hash: str, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """What the graph makes of an item's blocks: `[num_tokens + 1, fat_dim]`, the last row of what goes nowhere.

        `positions` says for each row of the item where in the step its placeholder is, `num_tokens` for nowhere.
        """
        cache = self.encoder_cache
        block_ids, tokens_per_block = cache.get_block_ids(mm_hash), cache.get_tokens_per_block(mm_hash)
        assert block_ids is not None and tokens_per_block is not None
        padding = [cache.scratch_block_id] * (cache.num_blocks - len(block_ids))
        views = tuple(cache.buffer[block_id] for block_id in [*block_ids, *padding])
        vision_positions = torch.full((cache.num_blocks, cache.block_size), num_tokens, dtype=torch.int64)
        start = 0
        for row, count in enumerate(tokens_per_block):
            part = positions[start : start + count]
            vision_positions[row, : len(part)] = part
            start += count
        merged = torch.zeros(num_tokens + 1, cache.fat_dim, dtype=cache.dtype)
        merged[vision_positions.view(-1)] = torch.cat(views).cpu()
        return merged

    def _model_output(self, output: SchedulerOutput, samples: bool) -> ModelRunnerOutput:
        """One token for each request whose prompt is through, none for the others."""
        sampled: list[list[int]] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            through = request.computed + num_scheduled >= request.prompt_tokens + request.sampled
            sampled.append([SAMPLED_TOKEN] if samples and through else [])
            request.sampled += len(sampled[-1])
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )


class ContractWorker:
    """The platform's worker class. Its way to stop tells the connector nothing."""

    def __init__(
        self,
        vllm_config: Any,
        connector: Any,
        told: "Told",
        rank: int,
        cache_options: dict[str, Any],
        **runner_options: Any,
    ) -> None:
        """`cache_options` are the cache's arguments, `runner_options` the runner's: by default the roles are vLLM's."""
        self.vllm_config = vllm_config
        self.rank = rank
        self.device = torch.device("cpu")
        self.model_runner: Any = None
        self.is_shut_down = False
        self._make_runner: Callable[[], ContractRunner] = lambda: ContractRunner(
            connector,
            told,
            EncoderCacheBlocks(**cache_options),
            rank=rank,
            **{
                "is_producer": vllm_config.ec_transfer_config.is_ec_producer,
                "is_consumer": vllm_config.ec_transfer_config.is_ec_consumer,
                **runner_options,
            },
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Make the runner with its cache, and register that with the connector."""
        self.model_runner = self._make_runner()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute_model(scheduler_output)

    def reset_encoder_cache(self) -> None:
        self.model_runner.reset_encoder_cache()

    def shutdown(self) -> None:
        self.is_shut_down = True


def _placeholders(feature: MultiModalFeatureSpec) -> torch.Tensor:
    """Where in the prompt each embedding of the item goes."""
    where = feature.mm_position
    positions = torch.arange(where.offset, where.offset + where.length)
    return positions if where.is_embed is None else positions[where.is_embed]


def _path(request: _Request) -> str:
    return request.adapter.lora_path if request.adapter is not None else ""
