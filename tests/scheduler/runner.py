# SPDX-License-Identifier: Apache-2.0
"""A stand-in for one rank's model runner: what vLLM's V1 runner does around its encoder cache, and no model.

The order of a step is the runner's: drop freed hashes, drop the plan of a step without tokens, bind, start saves, start
loads, encode and save each item, gather, finish. Two of its ways to die are kept: an item to encode that holds no
pixels, and a hash that is not in the cache when its rows are gathered.
"""

import pickle
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ModelRunnerOutput,
    make_empty_encoder_model_runner_output,
)

from connector.workers import run_plan
from storage_tiers.block_mapping import BlockMapping
from tests.scheduler.items import Image, encode, pixels_of, seed_of

SAMPLED_TOKEN = 3

STARTS_SAVES = hasattr(ECConnectorBase, "start_save_caches")
BUILDS_WORKER_META = hasattr(ECConnectorBase, "build_connector_worker_meta")
"""Whether vLLM's runners call these hooks."""


@dataclass
class _Request:
    features: list[MultiModalFeatureSpec]
    prompt_tokens: int
    adapter: LoRARequest | None
    computed: int
    sampled: int = 0


@dataclass
class Told:
    """What the test knows and no runner could: which picture each item of each request really is."""

    images: dict[str, list[Image]] = field(default_factory=dict)
    weights: int = 0
    """Changes when the encoder's weights do."""


class RunnerStandIn:
    """One rank. Its cache is a dictionary, as the V1 runner's is, or the mapping that our worker class puts there."""

    def __init__(self, connector: ECConnectorBase, told: Told, blocks: BlockMapping | None = None) -> None:
        """With `blocks`, the cache lies in device blocks, and each step begins as the worker hook begins it."""
        self.connector = connector
        self.blocks = blocks
        self.encoder_cache: MutableMapping[str, torch.Tensor] = {} if blocks is None else blocks
        self.encoded: Counter[str] = Counter()
        """Runs of the encoder by identifier."""
        self.gathered: list[tuple[str, str]] = []
        """Request and identifier of each item whose rows went into the language model, in order."""
        self._told = told
        self._requests: dict[str, _Request] = {}

    def reset_encoder_cache(self) -> None:
        self.encoder_cache.clear()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        if self.blocks is not None:
            output = run_plan(output, self.connector, self.blocks)
        self._update_states(output)
        if not self.connector.is_consumer:
            self._with_connector(output, gather=False)
            return make_empty_encoder_model_runner_output(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        ec_output = self._with_connector(output, gather=True)
        model_output = self._model_output(output)
        model_output.ec_connector_output = ec_output
        return model_output

    def _update_states(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for mm_hash in output.free_encoder_mm_hashes:
            self.encoder_cache.pop(mm_hash, None)
        for new in output.scheduled_new_reqs:
            self._requests[new.req_id] = _Request(
                new.mm_features, len(new.prompt_token_ids or ()), new.lora_request, new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request_id].computed = computed

    def _with_connector(self, output: SchedulerOutput, gather: bool) -> ECConnectorOutput:
        connector, ec_output = self.connector, ECConnectorOutput()
        assert output.ec_connector_metadata is not None
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(output.ec_connector_metadata)))
        if connector.is_producer and STARTS_SAVES:
            connector.start_save_caches(encoder_cache=self.encoder_cache)
        if connector.is_consumer:
            connector.start_load_caches(self.encoder_cache)
        try:
            self._encode(output)
            if gather:
                self._gather(output)
        finally:
            ec_output.finished_sending, ec_output.finished_recving = connector.get_finished(output.finished_req_ids)
            if BUILDS_WORKER_META:
                ec_output.ec_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
        return ec_output

    def _encode(self, output: SchedulerOutput) -> None:
        for request_id, indices in output.scheduled_encoder_inputs.items():
            request = self._requests[request_id]
            for index in indices:
                feature = request.features[index]
                if feature.data is None:
                    continue
                seed = pixels_of(feature.data)
                if seed is None:
                    raise RuntimeError(f"the encoder was given {feature.identifier} without pixels: the engine dies")
                self.encoder_cache[feature.identifier] = encode(
                    seed, feature.mm_position.get_num_embeds(), feature.modality, _path(request), self._told.weights
                ).clone()
                self.encoded[feature.identifier] += 1
                self.connector.save_caches(encoder_cache=self.encoder_cache, mm_hash=feature.identifier)

    def _gather(self, output: SchedulerOutput) -> None:
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            for index, feature in enumerate(request.features):
                start = max(request.computed - feature.mm_position.offset, 0)
                end = min(request.computed + num_scheduled - feature.mm_position.offset, feature.mm_position.length)
                if start >= end:
                    continue
                start, end = feature.mm_position.get_embeds_indices_in_range(start, end)
                if start == end:
                    continue
                cached = self.encoder_cache.get(feature.identifier)
                if cached is None:
                    raise RuntimeError(f"Encoder cache miss for {feature.identifier}.")
                image = self._told.images[request_id][index]
                right = encode(seed_of(image.picture), image.rows, image.modality, _path(request), self._told.weights)
                assert torch.equal(cached[start:end], right[start:end]), f"{request_id} got wrong rows of {image}"
                self.gathered.append((request_id, feature.identifier))

    def _model_output(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One token for each request whose prompt is through, none for the others."""
        sampled: list[list[int]] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            through = request.computed + num_scheduled >= request.prompt_tokens + request.sampled
            sampled.append([SAMPLED_TOKEN] if through else [])
            request.sampled += len(sampled[-1])
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )


def _path(request: _Request) -> str:
    return request.adapter.lora_path if request.adapter is not None else ""
