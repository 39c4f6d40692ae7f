# SPDX-License-Identifier: Apache-2.0
"""The fingerprint: a digest of everything besides `mm_hash` that the bytes of an embedding depend on.

This room turns facts into one string and samples weight files to get facts. Which facts matter is the connector's to
say: no vLLM configuration may enter, and no tier.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import xxhash

__all__ = ["fingerprint_of", "sample_weight_files", "with_adapter", "with_epoch"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
_SAMPLE_BYTES = 64 << 10
_MAX_SAMPLED_FILES = 256
"""Files beyond these count by name and size only: at most 48 MiB are read whatever the model."""
_ADAPTER_CONFIG = "adapter_config.json"
"""Holds LoRA's scale, which changes the output while the weights stay as they are."""


def fingerprint_of(facts: Mapping[str, object]) -> str:
    """Digest of `facts`: 64 hex digits, the same in every process and for every order of keys. Any thread.

    A fact is None, a bool, a number, a string, or a list or mapping of facts. Raises TypeError that names the key of
    anything else.
    """
    _check(facts, "")
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(canonical.encode()).hexdigest()


def with_epoch(fingerprint: str, nonce: str) -> str:
    """The fingerprint from now on, after weights were replaced in memory: no file says so, hence a random `nonce`."""
    return fingerprint_of({"base": fingerprint, "epoch": nonce})


def with_adapter(fingerprint: str, adapter_path: Path | str) -> str:
    """The fingerprint of items that the vision tower encodes through the adapter (LoRA) at `adapter_path`.

    Another file under the same path gives another fingerprint; of a hub id only the name is known. Raises OSError where
    the files are there and cannot be read. Reads up to 192 KiB per weight file: not for the step thread.
    """
    directory = Path(adapter_path)
    config = directory / _ADAPTER_CONFIG
    facts = {
        "base": fingerprint,
        "adapter": str(adapter_path),
        "files": sample_weight_files(directory),
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
    }
    return fingerprint_of(facts)


def sample_weight_files(directory: Path) -> dict[str, dict[str, int | str]]:
    """Name, size in bytes and a sample of each weight file directly in `directory`; {} where that is no directory.

    The sample is an XXH3-128 of the first, middle and last 64 KiB, enough to tell one training step from the next
    without reading gigabytes. Raises OSError for a file that cannot be read. Not for the step thread.
    """
    if not directory.is_dir():
        return {}
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    facts: dict[str, dict[str, int | str]] = {}
    for number, path in enumerate(files):
        facts[path.name] = {"bytes": path.stat().st_size}
        if number < _MAX_SAMPLED_FILES:
            facts[path.name]["sample"] = _sample(path)
    return facts


def _sample(path: Path) -> str:
    size = path.stat().st_size
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        for offset in sorted({0, max(0, (size - _SAMPLE_BYTES) // 2), max(0, size - _SAMPLE_BYTES)}):
            file.seek(offset)
            hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def _check(value: object, where: str) -> None:
    """Refuse what JSON would write in an order or form that another process need not repeat."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"fingerprint fact {where or '(top)'}: key {key!r} is no string")
            _check(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check(inner, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"fingerprint fact {where}: {value} is no number that JSON has")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"fingerprint fact {where}: {type(value).__name__} cannot be written as JSON")
