# SPDX-License-Identifier: Apache-2.0
"""What the user can set, checked before anything is built.

Storage sizing is LMCache's configuration (`lmcache_config.py` reads it); behaviour is one validated model of our own. A
mistake is an error here, at start, that names the key, where it came from, its value and what is allowed. Nothing but
values leaves this room: no tier, no thread and no vLLM object may enter.
"""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lmcache.v1.config import _CONFIG_DEFINITIONS
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from connector.lmcache_config import Given, SettingsError, build_config, lmcache_names, read_yaml, storage_layers

__all__ = [
    "BehaviourSettings",
    "Settings",
    "SettingsError",
    "StorageSettings",
    "describe",
    "in_words",
    "load_settings",
]

logger = logging.getLogger(f"vllm.{__name__}")

PAGE_BYTES = 4096
GIB_BYTES = 1024**3
BEHAVIOUR_PREFIX = "ec."

# What LMCache's loader makes of an encoder cache without a size, in GiB. Set here, so that its origin can be told.
_POOL_GIB_INSTEAD_OF_ZERO = 1.0
_DISK_GIB_INSTEAD_OF_ZERO = 64.0


class BehaviourSettings(BaseModel):
    """How the connector behaves: keys of `ec_connector_extra_config`, or of the YAML's `extra_config` after `ec.`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    namespace: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="Deployments with different namespaces never share an item. Empty: LMCache's own keys.",
    )
    persist_client_ids: bool = Field(
        default=False,
        description="Keep items in the lower tiers under identifiers that a client chose, which are no content hashes.",
    )
    accept_unverified_files: bool = Field(
        default=False,
        description="Serve files that LMCache itself wrote, which hold no digest and no fingerprint to check.",
    )
    reset_invalidates: bool = Field(
        default=True, description="An encoder cache reset (new weights, sleep) makes everything stored before a miss."
    )
    staging_deadline_seconds: float = Field(
        default=2.0,
        gt=0,
        description="How long one request may wait for bytes from a lower tier before the item is encoded.",
    )
    max_lease_fraction: float = Field(
        default=0.5, gt=0, le=1, description="Share of the pool that leases and staging for requests may hold at once."
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="Threads that read and write the lower tiers.")
    io_queue_items: int = Field(
        default=1024,
        ge=1,
        description="Restores that may wait for an I/O thread; what comes on top is a miss.",
    )
    skip_slow_restores: bool = Field(
        default=True, description="Do not attempt a restore that is estimated to take longer than encoding."
    )
    save_queue_bytes: int = Field(
        default=512 * 1024**2,
        ge=1,
        description="Bytes of encoder outputs that a worker's copy thread may hold; what comes on top is not saved.",
    )
    spill_policy: Literal["write_behind", "on_evict"] = Field(
        default="write_behind",
        description="When an item in device blocks is saved: soon after it was encoded, or when it leaves the device "
        "or has been there unsaved for max_dirty_seconds. Without the worker hook always write_behind.",
    )
    max_dirty_seconds: float = Field(
        default=30.0, gt=0, description="Longest time that an item in device blocks stays unsaved."
    )
    save_bytes_per_step: int = Field(
        default=256 * 1024**2,
        ge=1,
        description="Bytes of new items in device blocks that one step may hand to the copy thread; the rest waits.",
    )
    device_copy: Literal["auto", "eager", "side_stream", "compiled_scatter"] = Field(
        default="auto", description="How bytes move between host memory and device blocks."
    )
    device_min_hold_ms: float = Field(
        default=0.0,
        ge=0,
        description="Least time between an item's last write or load and the reuse of its blocks, for remote readers.",
    )
    device_block_size: int = Field(
        default=256, ge=1, description="Tokens of one device block; an item takes whole blocks."
    )
    device_num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="Device blocks, the scratch block included; null: enough for the scheduler's encoder cache size.",
    )
    transfer_slots: int = Field(
        default=4096, ge=64, le=65536, description="Copies between device and pool that may be outstanding at once."
    )
    populate_pool: bool = Field(
        default=True,
        description="Touch the pool's memory in the background at start, so that no copy pays for page faults.",
    )
    log_interval_seconds: float = Field(
        default=10.0, gt=0, description="The least time between two log lines of one kind."
    )
    weight_fingerprint: Literal["sample", "none"] = Field(
        default="sample",
        description="Whether a sample of the weight files is part of what must match for stored bytes to be valid.",
    )

    @model_validator(mode="after")
    def _queue_feeds_threads(self) -> "BehaviourSettings":
        if self.io_queue_items < self.io_threads:
            raise ValueError(
                f"io_queue_items = {self.io_queue_items} leaves some of io_threads = {self.io_threads} idle; "
                f"allowed is io_queue_items of io_threads or more"
            )
        return self


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """Where items are kept below the device, and how much of it; all of it is per engine on this host, not per rank."""

    pool_bytes: int
    """Size of the shared CPU pool, from `max_local_cpu_size` in GiB, in whole pages of 4096 bytes."""
    disk_directory: Path | None
    """Directory of the disk tier, absolute, from `local_disk`; None: no disk tier."""
    disk_bytes: int
    """Byte budget of that directory, from `max_local_disk_size` in GiB; 0 without a directory."""
    direct_io: bool
    """Whether the disk tier bypasses the page cache: LMCache's `extra_config.use_odirect`."""
    lmcache_config: Any = field(compare=False, repr=False)
    """The whole of it as LMCache's `LMCacheEngineConfig`, for what speaks LMCache."""
    origins: Mapping[str, str] = field(compare=False, repr=False)
    """Where each value came from, by LMCache's name for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that was set, validated."""

    storage: StorageSettings
    """Sizes and places."""
    behaviour: BehaviourSettings
    """Policies, limits and deadlines."""
    behaviour_origins: Mapping[str, str] = field(compare=False, repr=False)
    """Where each field of `behaviour` came from, by its name."""


def load_settings(extra_config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and check every source of settings; nothing is created and no size is compared with the machine yet.

    `extra_config` is vLLM's `ec_connector_extra_config`. Precedence, weakest first: defaults, the YAML file,
    `LMCACHE_*`, the file's `ec_` keys, `LMCACHE_EC_*`, `extra_config`. Behaviour merges key by key; any other
    `extra_config` of LMCache's replaces the one below, as it does there. Raises SettingsError.
    """
    direct, storage_keys = _split_extra_config(extra_config)
    path, document = _read_config_file(extra_config, environ)
    layers = storage_layers(document, path, environ, storage_keys, _places())
    resolved: dict[str, Given] = {}
    behaviour: dict[str, Given] = {}
    for layer in layers:
        nested = _take_behaviour(layer)
        # The last layer is ec_connector_extra_config: there a key can stand on its own or in a nested extra_config.
        for name in nested.keys() & direct.keys() if layer is layers[-1] else ():
            raise SettingsError.bad_value(name, direct[name].origin, direct[name].value, "to set it once")
        behaviour |= nested
        resolved |= layer
    behaviour |= direct
    return Settings(_storage(resolved), _behaviour(behaviour), _origins(behaviour, BehaviourSettings.model_fields))


def describe(settings: Settings) -> list[tuple[str, str, str]]:
    """Rows for the log at start: name, value with its unit, and where the value came from."""
    storage, behaviour = settings.storage, settings.behaviour
    sizes = {
        "max_local_cpu_size": in_words("pool_bytes", storage.pool_bytes),
        "local_disk": str(storage.disk_directory or "no disk tier"),
        "max_local_disk_size": in_words("disk_bytes", storage.disk_bytes),
        "use_odirect": in_words("direct_io", storage.direct_io),
    }
    rows = [(name, value, storage.origins[name]) for name, value in sizes.items()]
    return rows + [(name, in_words(name, value), settings.behaviour_origins[name]) for name, value in behaviour]


def _split_extra_config(extra_config: Mapping[str, Any]) -> tuple[dict[str, Given], dict[str, Any]]:
    """Behaviour set in `ec_connector_extra_config`, and the storage keys in it."""
    origin = "ec_connector_extra_config"
    behaviour: dict[str, Given] = {}
    storage: dict[str, Any] = {}
    for key, value in extra_config.items():
        if key in BehaviourSettings.model_fields:
            behaviour[key] = Given(value, origin, for_encoder_cache=True)
        elif key in lmcache_names():
            storage[key] = value
        elif key != "config_file":
            valid = {"config_file", *BehaviourSettings.model_fields, *lmcache_names()}
            raise SettingsError.unknown_key(key, origin, valid)
    return behaviour, storage


def _read_config_file(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Path and content of the YAML file; ("", {}) where none is named."""
    if "config_file" in extra_config:
        named, origin = extra_config["config_file"], "ec_connector_extra_config"
    else:
        named, origin = environ.get("LMCACHE_CONFIG_FILE", "") or None, "environment variable LMCACHE_CONFIG_FILE"
        if named is None:
            return "", {}
    if not isinstance(named, str):
        raise SettingsError.bad_value("config_file", origin, named, "the path of a YAML file")
    return named, read_yaml(_expanded("config_file", named, origin), origin)


def _places() -> dict[str, str]:
    """How to write what is no name of LMCache's; somebody will try `ec_namespace` first."""
    places = {name: f"{BEHAVIOUR_PREFIX}{name} under extra_config" for name in BehaviourSettings.model_fields}
    return places | {"use_odirect": "use_odirect under extra_config"}


def _take_behaviour(layer: dict[str, Given]) -> dict[str, Given]:
    """Take our `ec.` keys out of the layer's `extra_config`: in LMCache the next one would replace them all."""
    given = layer.get("extra_config")
    if given is None or given.value is None:
        return {}
    taken: dict[str, Given] = {}
    rest: dict[Any, Any] = {}
    for key, value in given.value.items():
        if not str(key).startswith(BEHAVIOUR_PREFIX):
            rest[key] = value
            continue
        name = str(key).removeprefix(BEHAVIOUR_PREFIX)
        if name not in BehaviourSettings.model_fields:
            valid = [f"{BEHAVIOUR_PREFIX}{known}" for known in BehaviourSettings.model_fields]
            raise SettingsError.unknown_key(key, f"{given.origin}, extra_config", valid)
        taken[name] = Given(value, f"{given.origin}, extra_config: {key}", given.for_encoder_cache)
    if taken and not rest:
        del layer["extra_config"]  # It says nothing to LMCache, and must not hide what a weaker layer says.
    else:
        layer["extra_config"] = replace(given, value=rest)
    return taken


def _behaviour(given: Mapping[str, Given]) -> BehaviourSettings:
    """The validated model. Raises SettingsError that names every wrong value."""
    try:
        return BehaviourSettings(**{name: setting.value for name, setting in given.items()})
    except ValidationError as error:
        messages = [_message(details["loc"], details["msg"], given) for details in error.errors()]
        raise SettingsError("; ".join(messages)) from error


def _message(location: tuple[int | str, ...], message: str, given: Mapping[str, Given]) -> str:
    """One of pydantic's findings in our words. One without a location is about several fields."""
    if not location:
        origins = {setting.origin for name, setting in given.items() if name in message}
        return f"{message.removeprefix('Value error, ')} (from {' and '.join(sorted(origins))})"
    name = str(location[0])
    return str(SettingsError.bad_value(name, given[name].origin, given[name].value, _allowed(name)))


def _allowed(name: str) -> str:
    """What the behaviour setting `name` can be, in words, read from the model."""
    schema = BehaviourSettings.model_json_schema()["properties"][name]
    schema = schema.get("anyOf", [schema])[0]  # of a setting that can be null: what else it can be
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "pattern" in schema:
        return "at most 64 letters, digits, '.', '_' and '-'"
    words = {"boolean": "true or false", "integer": "an integer", "number": "a number"}[schema["type"]]
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return " and ".join([words, *(f"{text} {schema[key]:g}" for key, text in bounds.items() if key in schema)])


def _origins(given: Mapping[str, Given], names: Any) -> dict[str, str]:
    """Where each of `names` came from."""
    return {name: given[name].origin if name in given else "default" for name in names}


def _storage(given: dict[str, Given]) -> StorageSettings:
    """Meaning of the resolved LMCache settings. Raises SettingsError for what LMCache takes and we cannot do."""
    directory = _directory(given.get("local_disk"))
    given["max_local_cpu_size"] = _size(given, "max_local_cpu_size", _POOL_GIB_INSTEAD_OF_ZERO)
    if directory is not None:
        given["local_disk"] = replace(given["local_disk"], value=str(directory))
        given["max_local_disk_size"] = _size(given, "max_local_disk_size", _DISK_GIB_INSTEAD_OF_ZERO)
    elif given.get("max_local_disk_size", _NOTHING).value:
        logger.warning(
            "max_local_disk_size (from %s) has no effect without local_disk", given["max_local_disk_size"].origin
        )
    if "local_cpu" in given and given["local_cpu"].for_encoder_cache and not given["local_cpu"].value:
        raise SettingsError.bad_value(
            "local_cpu", given["local_cpu"].origin, False, "true: items pass through the CPU tier"
        )
    config = build_config({name: setting.value for name, setting in given.items()})
    return StorageSettings(
        pool_bytes=int(config.max_local_cpu_size * GIB_BYTES) // PAGE_BYTES * PAGE_BYTES,
        disk_directory=directory,
        disk_bytes=int(config.max_local_disk_size * GIB_BYTES) if directory else 0,
        direct_io=_direct_io(given.get("extra_config", _NOTHING)),
        lmcache_config=config,
        origins=_origins(given, [*given, "local_disk", "max_local_disk_size"])
        | {"use_odirect": _origin_of_direct_io(given.get("extra_config", _NOTHING))},
    )


_NOTHING = Given(None, "default")


def _size(given: Mapping[str, Given], name: str, instead_of_zero: float) -> Given:
    """The size `name` in GiB, never 0.

    A 0 in a layer that the KV cache shares is about the KV cache: LMCache's loader then puts its own size, and so do
    we. Raises SettingsError for a 0 that was meant for encoder caches.
    """
    setting = given.get(name, Given(_CONFIG_DEFINITIONS[name]["default"], "default"))
    if setting.value * GIB_BYTES >= PAGE_BYTES:
        return setting
    if setting.for_encoder_cache or setting.value:
        raise SettingsError.bad_value(name, setting.origin, setting.value, "a number of GiB, one page or more")
    origin = f"LMCache's default for encoder caches, as {name} is 0 ({setting.origin})"
    return Given(instead_of_zero, origin)


def _directory(given: Given | None) -> Path | None:
    """The one directory that `local_disk` names, absolute; None where it names none."""
    if given is None or given.value is None:
        return None
    text = given.value
    if "," in text:
        allowed = "one directory; put several drives under one file system (RAID 0, LVM) and name its mount point"
        raise SettingsError.bad_value("local_disk", given.origin, text, allowed)
    if "://" in text or "\0" in text or not text:
        allowed = "a directory, plain or after file://; remote stores go into remote_url"
        raise SettingsError.bad_value("local_disk", given.origin, text, allowed)
    # LMCache would make a directory named "~", and a relative path would move with the process.
    return _expanded("local_disk", text, given.origin).absolute()


def _expanded(key: str, text: str, origin: str) -> Path:
    """`text` as a path, with a leading ~ replaced by the home directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError.bad_value(key, origin, text, f"a path that exists here ({error})") from error


def _direct_io(extra: Given) -> bool:
    """LMCache's `use_odirect`, which it takes as true for any text, "false" too."""
    value = (extra.value or {}).get("use_odirect", False)
    if not isinstance(value, bool):
        raise SettingsError.bad_value("use_odirect", f"{extra.origin}, extra_config", value, "true or false")
    return value


def _origin_of_direct_io(extra: Given) -> str:
    """Where `use_odirect` came from."""
    return f"{extra.origin}, extra_config" if "use_odirect" in (extra.value or {}) else "default"


def in_words(name: str, value: Any) -> str:
    """`value` with the unit that `name` ends on, for people; a number left to us is "auto". Any thread."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    if name.endswith("_bytes"):
        units = {"GiB": GIB_BYTES, "MiB": 1024**2, "KiB": 1024, "B": 1}
        unit = next(unit for unit, size in units.items() if value >= size or size == 1)
        # Rounded down: what is named as the most that fits must fit.
        return f"{math.floor(value / units[unit] * 1000) / 1000:.10g} {unit}"
    if name.endswith("_seconds"):
        return f"{value:g} s"
    return str(value) if value != "" else "none"
