# SPDX-License-Identifier: Apache-2.0
"""LMCache's configuration, read strictly.

LMCache warns and goes on where a name or a value in its YAML file or its variables is wrong. This room collects what
was set, layer by layer in LMCache's order, refuses what LMCache would drop, and hands the rest to LMCache's own loader.
What a setting means for this project is decided in `settings.py`. Reading that one file is the only I/O; no tier and no
vLLM may enter.
"""

import difflib
import logging
import math
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Union, get_args, get_origin

import yaml
from lmcache.v1.config import (
    _CONFIG_ALIASES,
    _CONFIG_DEFINITIONS,
    LMCacheEngineConfig,
    _parse_quoted_string,
    load_ec_engine_config,
)
from pydantic import TypeAdapter

__all__ = ["Given", "SettingsError", "build_config", "lmcache_names", "read_yaml", "storage_layers"]

# vLLM configures the logger `vllm` alone: under another name, INFO lines vanish. vLLM itself is not needed for that.
logger = logging.getLogger(f"vllm.{__name__}")

ENV_PREFIX = "LMCACHE_"
EC_ENV_PREFIX = "LMCACHE_EC_"
EC_FILE_PREFIX = "ec_"

# What LMCache 0.5.6 reads from the environment besides its settings. A test compares this with LMCache's source.
_OTHER_VARIABLES = frozenset(
    {
        "LMCACHE_CONFIG_FILE",
        "LMCACHE_DEVICE_BACKEND",
        "LMCACHE_DISABLE_BANNER",
        "LMCACHE_FORCE_SKIP_SAVE",
        "LMCACHE_GPU_STAGING_BUFFER_BYTES",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_MP_TRANSFER_MODE",
        "LMCACHE_MQ_TIMEOUT",
        "LMCACHE_OFFLOAD_RPC_PORT",
        "LMCACHE_ROCM_ENABLE_BATCH_MEMCPY",
        "LMCACHE_SERVER_URL",
        "LMCACHE_TRACK_USAGE",
    }
)
_OTHER_PREFIXES = (
    "LMCACHE_AEROSPIKE_",
    "LMCACHE_CONTROLLER_",
    "LMCACHE_COORDINATOR_",
    "LMCACHE_MUSA_",
    "LMCACHE_PLUGIN_",
    "LMCACHE_REQUEST_TELEMETRY_",
    "LMCACHE_RESP_",
    "LMCACHE_RUNTIME_PLUGIN_",
    "LMCACHE_USAGE_TRACK_",
)

_TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
    list[str]: "a list of strings",
}

Layer = dict[str, "Given"]
"""What one source sets, by LMCache's present name."""


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the key, where it came from, its value and what is allowed."""

    @classmethod
    def unknown_key(cls, key: object, origin: str, valid: Collection[str], note: str = "") -> "SettingsError":
        """The error for a `key` that nobody knows, with the close matches among `valid` and all of `valid`."""
        close = difflib.get_close_matches(str(key), valid, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        return cls(f"unknown setting {key!r} (from {origin}).{hint}{note} Valid names: {', '.join(sorted(valid))}")

    @classmethod
    def bad_value(cls, key: str, origin: str, value: object, allowed: str) -> "SettingsError":
        """The error for a `value` that `key` cannot have; `allowed` completes "allowed is ..."."""
        # extra_config holds the credentials of remote stores: they belong in no log.
        shown = f"a {type(value).__name__}" if key == "extra_config" else repr(value)
        return cls(f"{key} = {shown:.200} (from {origin}) cannot be used; allowed is {allowed}")


@dataclass(frozen=True, slots=True)
class Given:
    """One value that somebody set, and where."""

    value: Any
    """The value, converted to the type that LMCache declares."""
    origin: str
    """Where it was set, in words: a file, a variable, `ec_connector_extra_config`."""
    for_encoder_cache: bool = False
    """Set for encoder caches alone, not in a layer that the KV cache shares."""


def lmcache_names() -> frozenset[str]:
    """All names that LMCache knows for its settings, old ones included."""
    return frozenset(_CONFIG_DEFINITIONS) | frozenset(_CONFIG_ALIASES)


def read_yaml(path: Path, origin: str) -> dict[str, Any]:
    """The mapping in the YAML file `path`, or {} for an empty file; `origin` says who named the file.

    Raises SettingsError where the file cannot be read, is not YAML, is not a mapping, or gives a key twice.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            document = yaml.load(stream, Loader=_StrictLoader)
    except OSError as error:
        reason = f"the path of a readable YAML file ({error.strerror})"
        raise SettingsError.bad_value("config_file", origin, str(path), reason) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} (from {origin}) is not a valid YAML file: {error}") from error
    if not isinstance(document, dict | None):
        kind = type(document).__name__
        raise SettingsError(f"{path} (from {origin}) holds a {kind}; allowed is a mapping of names to values")
    for key in document or {}:
        if not isinstance(key, str):
            raise SettingsError.unknown_key(key, str(path), lmcache_names())
    return document or {}


def storage_layers(
    document: Mapping[str, Any],
    path: str,
    environ: Mapping[str, str],
    top: Mapping[str, Any],
    not_here: Mapping[str, str],
) -> list[Layer]:
    """All layers from the weakest to the strongest, every name and value checked.

    They are: the YAML `document` read from `path`, `LMCACHE_*`, the document's `ec_*` keys and `ec:` map,
    `LMCACHE_EC_*`, and `top`, which is `ec_connector_extra_config`. `not_here` says how to write what is
    no name of LMCache's. Raises SettingsError for an unknown name, a value of the wrong type, or a name given twice in
    one layer.
    """
    shared, own = _split_document(document, path)
    extra = [(name, value, "ec_connector_extra_config") for name, value in top.items()]
    return [
        _layer(shared, not_here, for_encoder_cache=False),
        _layer(_shared_variables(environ), not_here, for_encoder_cache=False),
        _layer(own, not_here, for_encoder_cache=True),
        _layer(_own_variables(environ), not_here, for_encoder_cache=True),
        _layer(extra, not_here, for_encoder_cache=True),
    ]


def build_config(values: Mapping[str, Any]) -> Any:
    """LMCache's configuration object for encoder caches, with `values` set and LMCache's defaults for the rest.

    Raises SettingsError for a combination that LMCache refuses.
    """
    base = LMCacheEngineConfig.from_dict(dict(values))
    try:
        # The file was read above, and its `ec_` keys are in `values`: an empty one keeps LMCache from warning of them.
        config = load_ec_engine_config(base_config=base, config_file_path=os.devnull)
    except (AssertionError, ValueError) as error:
        raise SettingsError(f"LMCache refuses this combination of settings: {_reason(error)}") from error
    # LMCache has laid the process's LMCACHE_EC_* over `values` once more, and so over ec_connector_extra_config.
    for variable in os.environ:
        name = variable.removeprefix(EC_ENV_PREFIX).lower()
        if variable.startswith(EC_ENV_PREFIX) and hasattr(base, name := _CONFIG_ALIASES.get(name, name)):
            setattr(config, name, getattr(base, name))
    return config


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; PyYAML lets the second replace the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_Item = tuple[str, Any, str]
"""Key without its prefix, raw value, and where it was set."""


def _split_document(document: Mapping[str, Any], path: str) -> tuple[list[_Item], list[_Item]]:
    """The items that the KV cache shares, and those of the encoder cache: `ec_` keys and the `ec:` map."""
    shared: list[_Item] = []
    own: list[_Item] = []
    for key, value in document.items():
        # LMCache folds the case of these, and of no other key.
        folded = key.lower()
        if folded == "ec":
            if not isinstance(value, dict | None):
                raise SettingsError.bad_value(key, path, value, "a mapping of LMCache's names to values")
            own += [(str(name).lower(), nested, f"{path}, key {key}: {name}") for name, nested in (value or {}).items()]
        elif folded.startswith(EC_FILE_PREFIX):
            own.append((folded.removeprefix(EC_FILE_PREFIX), value, f"{path}, key {key}"))
        else:
            shared.append((key, value, path))
    return shared, own


def _shared_variables(environ: Mapping[str, str]) -> Iterable[_Item]:
    """The `LMCACHE_*` variables that are settings; warns of those that LMCache reads nowhere."""
    known = {f"{ENV_PREFIX}{name.upper()}": name for name in lmcache_names()}
    for variable, value in environ.items():
        if variable in known:
            yield known[variable], _parse_quoted_string(value), f"environment variable {variable}"
        elif variable.startswith(ENV_PREFIX) and not _is_other(variable):
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            logger.warning("environment variable %s is no setting that LMCache knows%s", variable, hint)


def _is_other(variable: str) -> bool:
    """Whether `variable` is read by LMCache for something else, or is looked at in another layer."""
    return variable in _OTHER_VARIABLES or variable.startswith((*_OTHER_PREFIXES, EC_ENV_PREFIX))


def _own_variables(environ: Mapping[str, str]) -> Iterable[_Item]:
    """The `LMCACHE_EC_*` variables, all of which must be settings."""
    for variable, value in environ.items():
        if variable.startswith(EC_ENV_PREFIX):
            name = variable.removeprefix(EC_ENV_PREFIX).lower()
            yield name, _parse_quoted_string(value), f"environment variable {variable}"


def _layer(items: Iterable[_Item], not_here: Mapping[str, str], for_encoder_cache: bool) -> Layer:
    """One layer of checked values under LMCache's present names."""
    layer: Layer = {}
    for key, raw, origin in items:
        name = _present_name(key, origin, not_here)
        if name in layer:
            allowed = f"to set it once, and {layer[name].origin} sets it too"
            raise SettingsError.bad_value(key, origin, raw, allowed)
        layer[name] = Given(_converted(name, raw, origin), origin, for_encoder_cache)
    return layer


def _present_name(key: str, origin: str, not_here: Mapping[str, str]) -> str:
    """LMCache's name for `key`. An old name is resolved here: LMCache does so for `ec_` keys and drops most others."""
    if key in _CONFIG_DEFINITIONS:
        return key
    if key in _CONFIG_ALIASES:
        logger.warning("setting %s (from %s) is an old name of %s", key, origin, _CONFIG_ALIASES[key])
        return str(_CONFIG_ALIASES[key])
    note = f" Write it as {not_here[key]}." if key in not_here else ""
    raise SettingsError.unknown_key(key, origin, lmcache_names(), note)


def _converted(name: str, raw: Any, origin: str) -> Any:
    """`raw` as LMCache converts it. Raises SettingsError where LMCache would guess, truncate or keep a wrong type."""
    if raw is None and _may_be_none(name):
        return None
    try:
        value = _to_bool(raw) if _declared_type(name) is bool else _CONFIG_DEFINITIONS[name]["env_converter"](raw)
        _adapter(name).validate_python(value, strict=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingsError.bad_value(name, origin, raw, _allowed(name)) from error
    if not _is_same(raw, value):
        raise SettingsError.bad_value(name, origin, raw, _allowed(name))
    if name in _CHECKS:
        try:
            _CHECKS[name](value)
        except ValueError as error:
            raise SettingsError.bad_value(name, origin, raw, str(error)) from error
    return value


def _to_bool(raw: Any) -> bool:
    """`raw` as a truth value; LMCache's converter makes False of `yes`, `on` and every typo. Raises ValueError."""
    word = str(raw).strip().lower()
    if not isinstance(raw, bool | int | str) or word not in ("true", "1", "false", "0"):
        raise ValueError(word)
    return word in ("true", "1")


def _is_same(raw: Any, value: Any) -> bool:
    """Whether `value` says what `raw` said: `int` makes 2 of 2.7. Text is what converters are for, so it passes."""
    if isinstance(value, float) and math.isnan(value):
        return False
    if isinstance(raw, list):
        return isinstance(value, list) and all(map(_is_same, raw, value))
    if isinstance(raw, str) or isinstance(value, list):
        return True
    return bool(raw == value) and (isinstance(value, bool) or not isinstance(raw, bool))


def _declared_type(name: str) -> Any:
    """The type that LMCache declares for `name`, without its None."""
    declared = _CONFIG_DEFINITIONS[name]["type"]
    if get_origin(declared) is not Union:
        return declared
    return next(option for option in get_args(declared) if option is not NoneType)


def _may_be_none(name: str) -> bool:
    """Whether `name` can be null: declared so, or null by default."""
    definition = _CONFIG_DEFINITIONS[name]
    return definition["default"] is None or NoneType in get_args(definition["type"])


def _allowed(name: str) -> str:
    """What `name` can be, in words."""
    words = _TYPE_WORDS.get(_declared_type(name), str(_declared_type(name)))
    if name in _ALLOWED:
        words = _ALLOWED[name]
    return f"{words}, or null" if _may_be_none(name) else words


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Pydantic's check of the type that LMCache declares for `name`; None stands for an empty text."""
    return TypeAdapter(_declared_type(name) | None if _may_be_none(name) else _declared_type(name))


def _check_size(gib: float) -> None:
    """Raises ValueError for a size that cannot be one."""
    if not 0 <= gib < math.inf:
        raise ValueError(_SIZE_WORDS)


def _check_cache_policy(policy: str) -> None:
    """Raises ValueError for a policy that LMCache's `get_cache_policy` does not know."""
    # Imported late: it brings in every storage backend of LMCache, which takes seconds.
    from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

    if policy.upper() not in POLICY_MAPPING:
        raise ValueError(f"one of {', '.join(POLICY_MAPPING)}")


_SIZE_WORDS = "a number of GiB, 0 or more"
_ALLOWED = {
    "max_local_cpu_size": _SIZE_WORDS,
    "max_local_disk_size": _SIZE_WORDS,
    "hidden_states_retrieve_mode": "prefix_strict or skip_missing_chunks",
}
_CHECKS: dict[str, Callable[[Any], None]] = {
    "max_local_cpu_size": _check_size,
    "max_local_disk_size": _check_size,
    "cache_policy": _check_cache_policy,
}


def _reason(error: BaseException) -> str:
    """What LMCache checked: most of its checks are asserts without a message, so the line itself has to tell."""
    return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
