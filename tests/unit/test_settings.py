# SPDX-License-Identifier: Apache-2.0
"""Settings: every source is read in its order, and every mistake is an error that says what to do about it."""

import json
import logging
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lmcache
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.v1.config import load_ec_engine_config

from connector.capacity import check_capacity
from connector.lmcache_config import _is_other, lmcache_names
from connector.settings import (
    BehaviourSettings,
    Settings,
    SettingsError,
    StorageSettings,
    describe,
    load_settings,
)

GIB = 1024**3
CONFIGS = Path(__file__).parents[2] / "configs"
FIELDS = list(BehaviourSettings.model_fields)


def load(path: Path, text: str = "", extra: Mapping[str, Any] | None = None, **environ: str) -> Settings:
    """Settings from a YAML `text`, the JSON `extra` and nothing but `environ`."""
    file = path / "lmcache.yaml"
    file.write_text(text)
    return load_settings({"config_file": str(file), **(extra or {})}, environ)


def message(path: Path, text: str = "", extra: Mapping[str, Any] | None = None, **environ: str) -> str:
    """The error that `load` must raise."""
    with pytest.raises(SettingsError) as caught:
        load(path, text, extra, **environ)
    return str(caught.value)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the settings warn of. vLLM's logger, once configured, does not propagate to pytest's."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    loggers = [logging.getLogger(f"vllm.connector.{name}") for name in ("settings", "lmcache_config")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


# What is read, and which source wins


def test_defaults_without_any_source() -> None:
    settings = load_settings({}, {})
    assert settings.storage.pool_bytes == 5 * GIB  # LMCache's default
    assert settings.storage.disk_directory is None
    assert settings.storage.disk_bytes == 0
    assert settings.storage.direct_io is False
    assert settings.behaviour == BehaviourSettings()
    assert settings.behaviour.save_queue_bytes == 512 * 1024**2
    assert {origin for _, _, origin in describe(settings)} == {"default"}


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    text = "max_local_cpu_size: 1"
    extra: dict[str, Any] = {}
    environ: dict[str, str] = {}

    def outcome() -> tuple[float, str]:
        storage = load(tmp_path, text, extra, **environ).storage
        assert storage.lmcache_config.max_local_cpu_size * GIB == storage.pool_bytes
        return storage.pool_bytes / GIB, storage.origins["max_local_cpu_size"]

    file = str(tmp_path / "lmcache.yaml")
    assert outcome() == (1, file)
    environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "2"
    assert outcome() == (2, "environment variable LMCACHE_MAX_LOCAL_CPU_SIZE")
    text += "\nec_max_local_cpu_size: 3"
    assert outcome() == (3, f"{file}, key ec_max_local_cpu_size")
    environ["LMCACHE_EC_MAX_LOCAL_CPU_SIZE"] = "4"
    assert outcome() == (4, "environment variable LMCACHE_EC_MAX_LOCAL_CPU_SIZE")
    extra["max_local_cpu_size"] = 6
    assert outcome() == (6, "ec_connector_extra_config")


def test_the_process_environment_does_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # LMCache's loader reads os.environ by itself, and would put it over ec_connector_extra_config.
    monkeypatch.setenv("LMCACHE_EC_MAX_LOCAL_CPU_SIZE", "7")
    monkeypatch.setenv("LMCACHE_EC_CHUNK_SIZE", "16")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "absent.yaml"))
    assert load_settings({"max_local_cpu_size": 6}, {}).storage.lmcache_config.max_local_cpu_size == 6
    config = load(tmp_path, extra={"max_local_cpu_size": 6}, **os.environ).storage.lmcache_config
    assert (config.max_local_cpu_size, config.chunk_size) == (6, 16)
    assert load_settings({}, {}).storage.lmcache_config.chunk_size == 256


def test_the_ec_map_is_the_same_as_ec_keys(tmp_path: Path) -> None:
    nested = load(tmp_path, "ec:\n  max_local_cpu_size: 3\n  local_disk: /a").storage
    flat = load(tmp_path, "EC_Max_Local_CPU_Size: 3\nec_local_disk: /a").storage
    assert nested == flat
    assert nested.origins["local_disk"].endswith("lmcache.yaml, key ec: local_disk")
    assert load(tmp_path, "ec:").storage.pool_bytes == 5 * GIB


def test_the_result_is_what_lmcaches_own_loader_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "chunk_size: 64\nlocal_cpu: false\nmax_local_cpu_size: 0\nlocal_disk: file:///a\nlmcache_instance_id: me\n"
        "ec_remote_url: redis://host:1\nec:\n  blocking_timeout_secs: 3\nextra_config: {use_odirect: true}\n"
    )
    for name, value in {"LMCACHE_EC_CHUNK_SIZE": "32", "LMCACHE_LOCAL_DISK": "'/b'"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    theirs = load_ec_engine_config().to_dict()
    assert theirs["max_local_cpu_size"] == 1
    assert load_settings({}).storage.lmcache_config.to_dict() == theirs


def test_config_file_wins_over_the_variable(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("max_local_cpu_size: 9")
    assert load(tmp_path, "max_local_cpu_size: 1", LMCACHE_CONFIG_FILE=str(other)).storage.pool_bytes == GIB
    assert load_settings({}, {"LMCACHE_CONFIG_FILE": str(other)}).storage.pool_bytes == 9 * GIB
    assert load_settings({}, {"LMCACHE_CONFIG_FILE": ""}).storage.pool_bytes == 5 * GIB


def test_behaviour_comes_from_json_over_every_extra_config(tmp_path: Path) -> None:
    text = "extra_config: {ec.io_threads: 2, ec.namespace: a, ec.weight_fingerprint: none, use_odirect: true}"
    environ = {"LMCACHE_EC_EXTRA_CONFIG": json.dumps({"ec.namespace": "b", "ec.io_threads": 3})}
    settings = load(tmp_path, text, {"io_threads": 5}, **environ)
    behaviour, origins = settings.behaviour, settings.behaviour_origins
    assert (behaviour.weight_fingerprint, behaviour.namespace, behaviour.io_threads) == ("none", "b", 5)
    assert origins["weight_fingerprint"].endswith("lmcache.yaml, extra_config: ec.weight_fingerprint")
    assert origins["namespace"] == "environment variable LMCACHE_EC_EXTRA_CONFIG, extra_config: ec.namespace"
    assert origins["io_threads"] == "ec_connector_extra_config"
    assert origins["staging_deadline_seconds"] == "default"
    # A layer that holds only our keys hides nothing of LMCache's; and LMCache sees none of ours.
    assert settings.storage.direct_io is True
    assert settings.storage.lmcache_config.extra_config == {"use_odirect": True}


def test_lmcache_extra_config_of_a_stronger_layer_replaces(tmp_path: Path) -> None:
    settings = load(tmp_path, "extra_config: {use_odirect: true, a: 1}\nec_extra_config: {b: 2, ec.io_threads: 9}")
    assert settings.storage.lmcache_config.extra_config == {"b": 2}
    assert settings.storage.direct_io is False
    assert settings.behaviour.io_threads == 9


def test_old_names_are_understood_everywhere(tmp_path: Path, warnings: list[str]) -> None:
    # LMCache drops most of its own old names from a file, and follows them in `ec_` keys.
    for text in ("external_backends: [x]", "ec_external_backends: [x]"):
        assert load(tmp_path, text).storage.lmcache_config.storage_plugins == ["x"]
    assert load(tmp_path, "controller_url: h:1").storage.lmcache_config.controller_pull_url == "h:1"
    assert load(tmp_path, "nixl_buffer_size: 7").storage.lmcache_config.nixl_buffer_size == 7
    assert "controller_url" in warnings[-1]
    assert "controller_pull_url" in warnings[-1]


def test_yaml_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    text = "ec: &base\n  max_local_cpu_size: 2\nextra_config:\n  nested: {<<: *base, max_local_cpu_size: 3}"
    assert load(tmp_path, text).storage.pool_bytes == 2 * GIB


def test_settings_need_no_vllm() -> None:
    import subprocess

    code = "import sys, connector.settings as s; s.load_settings({}, {}); assert 'vllm' not in sys.modules"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What storage values mean


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("/a/b/", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("/a/b/,", "/a/b"),
        ("~/b", str(Path.home() / "b")),
        ("some/where", str(Path.cwd() / "some/where")),
    ],
)
def test_the_disk_directory_is_one_absolute_path(tmp_path: Path, text: str, directory: str) -> None:
    storage = load(tmp_path, extra={"local_disk": text, "max_local_disk_size": 0.5}).storage
    assert (str(storage.disk_directory), storage.disk_bytes) == (directory, GIB // 2)
    assert storage.lmcache_config.local_disk == directory


def test_a_stronger_layer_switches_the_disk_off(tmp_path: Path) -> None:
    base = "local_disk: /a\nmax_local_disk_size: 3\n"
    assert load(tmp_path, base + "ec_local_disk: null").storage.disk_directory is None
    # LMCache takes an empty variable for a failed conversion and keeps the disk on.
    storage = load(tmp_path, base, LMCACHE_EC_LOCAL_DISK="").storage
    assert (storage.disk_directory, storage.disk_bytes, storage.lmcache_config.local_disk) == (None, 0, None)


def test_several_disk_paths_are_refused_with_a_remedy(tmp_path: Path) -> None:
    text = message(tmp_path, "local_disk: /a/,/b/")
    assert "local_disk" in text
    assert "'/a/,/b/'" in text
    assert "RAID" in text


@pytest.mark.parametrize("path", ["s3://bucket", "file://", "redis://h:1"])
def test_no_url_and_no_empty_path_as_directory(tmp_path: Path, path: str) -> None:
    assert "allowed is a directory" in message(tmp_path, f"local_disk: {path}")


def test_zero_sizes_for_the_kv_cache_become_lmcaches_own(tmp_path: Path) -> None:
    storage = load(tmp_path, "local_cpu: false\nmax_local_cpu_size: 0\nlocal_disk: /a").storage
    assert (storage.pool_bytes, storage.disk_bytes) == (GIB, 64 * GIB)
    assert storage.lmcache_config.local_cpu is True
    assert "lmcache.yaml" in storage.origins["max_local_cpu_size"]


@pytest.mark.parametrize("text", ["ec_max_local_cpu_size: 0", "ec_max_local_disk_size: 0", "ec_local_cpu: false"])
def test_zero_sizes_for_encoder_caches_are_errors(tmp_path: Path, text: str) -> None:
    assert text.partition(":")[0] in message(tmp_path, "local_disk: /a\n" + text)


def test_a_disk_size_without_directory_is_warned_of(tmp_path: Path, warnings: list[str]) -> None:
    load(tmp_path, "max_local_disk_size: 4")
    assert "no effect without local_disk" in warnings[0]


def test_the_pool_is_whole_pages(tmp_path: Path) -> None:
    assert load(tmp_path, "max_local_cpu_size: 0.3").storage.pool_bytes == int(0.3 * GIB) // 4096 * 4096
    assert "one page" in message(tmp_path, "max_local_cpu_size: 1.0e-7")


# Mistakes in names


def mutated(name: str, draw: Any) -> str:
    """`name` with one slip of the keyboard."""
    at: int = draw(st.integers(0, len(name) - 1))
    letter: str = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    slips = {
        "drop": name[:at] + name[at + 1 :],
        "insert": name[:at] + letter + name[at:],
        "replace": name[:at] + letter + name[at + 1 :],
        "swap": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    }
    kind: str = draw(st.sampled_from(sorted(slips)))
    return slips[kind]


@settings(deadline=None)  # Files and a busy machine: time says nothing about a failure.
@given(st.data(), st.sampled_from(["yaml", "ec_", "ec:", "LMCACHE_EC_", "json", "ec."]))
def test_any_misspelt_key_is_refused_by_name(data: st.DataObject, source: str) -> None:
    names = FIELDS if source in ("json", "ec.") else sorted(lmcache_names())
    key = mutated(data.draw(st.sampled_from(names)), data.draw)
    if key in {*FIELDS, *lmcache_names(), "ec"} or key.startswith("ec_"):
        return
    document = {
        "yaml": {key: 1},
        "ec_": {f"ec_{key}": 1},
        "ec:": {"ec": {key: 1}},
        "ec.": {"extra_config": {f"ec.{key}": 1}},
    }
    environ = {f"LMCACHE_EC_{key.upper()}": "1"} if source == "LMCACHE_EC_" else {}
    with tempfile.TemporaryDirectory() as directory:
        extra = {key: 1} if source == "json" else {}
        text = message(Path(directory), yaml.safe_dump(document.get(source, {})), extra, **environ)
    assert "unknown setting" in text
    assert f"{key}'" in text
    assert "Valid names: " in text


def test_an_unknown_key_comes_with_close_and_valid_names(tmp_path: Path) -> None:
    text = message(tmp_path, "max_local_cpu_siz: 1")
    assert "'max_local_cpu_siz' (from " in text
    assert "lmcache.yaml" in text
    assert "Did you mean 'max_local_cpu_size'" in text
    assert "chunk_size" in text
    text = message(tmp_path, extra={"io_thread": 1})
    assert "'io_thread' (from ec_connector_extra_config)" in text
    assert "Did you mean 'io_threads'" in text
    assert "ec.io_threads" in message(tmp_path, "extra_config: {ec.io_thread: 1}")


@pytest.mark.parametrize("key", ["namespace", "ec_namespace"])
def test_behaviour_in_the_wrong_place_is_told_the_right_one(tmp_path: Path, key: str) -> None:
    assert "Write it as ec.namespace under extra_config" in message(tmp_path, f"{key}: a")


def test_unknown_ec_variables_are_errors_and_others_warnings(tmp_path: Path, warnings: list[str]) -> None:
    assert "LMCACHE_EC_CHUNK_SIZ" in message(tmp_path, LMCACHE_EC_CHUNK_SIZ="1")
    assert warnings == []
    load(
        tmp_path, LMCACHE_CHUNK_SIZ="1", LMCACHE_LOG_LEVEL="INFO", LMCACHE_COORDINATOR_URL="", LMCACHE_EC_CHUNK_SIZE="1"
    )
    assert warnings == [
        "environment variable LMCACHE_CHUNK_SIZ is no setting that LMCache knows; did you mean LMCACHE_CHUNK_SIZE?"
    ]


def test_every_variable_that_lmcache_reads_is_known() -> None:
    root = Path(lmcache.__file__).parent
    pattern = re.compile(
        r"""(?:getenv|environ(?:\.get)?)\s*[(\[]\s*["'](LMCACHE_\w+)|^\w*ENV\w*\s*=\s*["'](LMCACHE_\w+)""", re.M
    )
    found = {
        name for path in root.rglob("*.py") for match in pattern.findall(path.read_text()) for name in match if name
    }
    assert len(found) > 20
    settings = {f"LMCACHE_{name.upper()}" for name in lmcache_names()}
    assert {name for name in found - settings if not _is_other(name)} == set()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("chunk_size: 1\nchunk_size: 1", "chunk_size"),
        ("extra_config: {a: 1, a: 2}", "'a'"),
        ("ec_chunk_size: 1\nec: {chunk_size: 1}", "chunk_size"),
        ("ec_chunk_size: 1\nEC_chunk_size: 2", "chunk_size"),
        ("storage_plugins: [a]\nexternal_backends: [b]", "external_backends"),
    ],
)
def test_a_key_given_twice_is_an_error(tmp_path: Path, text: str, key: str) -> None:
    assert key in message(tmp_path, text)


def test_a_key_given_twice_in_other_places_is_an_error(tmp_path: Path) -> None:
    assert "LMCACHE_EC_chunk_size" in message(tmp_path, LMCACHE_EC_CHUNK_SIZE="1", LMCACHE_EC_chunk_size="1")
    extra = {"namespace": "a", "extra_config": {"ec.namespace": "b"}}
    assert "namespace = 'a'" in message(tmp_path, extra=extra)


# Mistakes in values


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_local_cpu_size", "lots", "a number of GiB, 0 or more"),
        ("max_local_cpu_size", -1, "a number of GiB, 0 or more"),
        ("max_local_cpu_size", float("nan"), "a number of GiB, 0 or more"),
        ("max_local_cpu_size", float("inf"), "a number of GiB, 0 or more"),
        ("max_local_cpu_size", True, "a number of GiB, 0 or more"),
        ("max_local_cpu_size", None, "a number of GiB, 0 or more"),
        ("max_local_cpu_size", [4], "a number of GiB, 0 or more"),
        ("chunk_size", 2.7, "an integer"),  # LMCache makes 2 of it
        ("chunk_size", "", "an integer"),
        ("local_cpu", "yes", "true or false"),  # LMCache makes False of it
        ("use_layerwise", 2, "true or false"),
        ("local_disk", False, "a string, or null"),  # LMCache makes a directory "False" of it
        ("local_disk", ["/a"], "a string, or null"),
        ("remote_url", 5, "a string, or null"),
        ("storage_plugins", 5, "a list of strings, or null"),
        ("storage_plugins", [5], "a list of strings, or null"),
        ("blend_check_layers", [1.5], "a list of integers, or null"),
        ("lmcache_worker_ports", "1,x", "a list of integers, or null"),
        ("extra_config", [1], "a mapping, or null"),
        ("extra_config", "{", "a mapping, or null"),
        ("cache_policy", "nonsense", "one of LRU, LFU, FIFO, MRU"),
        ("hidden_states_retrieve_mode", "x", "prefix_strict or skip_missing_chunks"),
    ],
)
def test_a_wrong_lmcache_value_is_an_error_everywhere(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    shown = f"{name} = {'a ' + type(value).__name__ if name == 'extra_config' else repr(value)}"
    for prefix in ("", "ec_"):
        text = message(tmp_path, yaml.safe_dump({prefix + name: value}))
        assert shown in text
        assert "lmcache.yaml" in text
        assert f"allowed is {allowed}" in text
    assert f"{shown} (from ec_connector_extra_config)" in message(tmp_path, extra={name: value})
    if isinstance(value, str):
        for variable in (f"LMCACHE_{name.upper()}", f"LMCACHE_EC_{name.upper()}"):
            assert f"{shown} (from environment variable {variable})" in message(tmp_path, "", None, **{variable: value})


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("max_local_cpu_size", "4", 4.0),
        ("max_local_cpu_size", 4, 4.0),
        ("chunk_size", 8.0, 8),
        ("local_cpu", "TRUE", True),
        ("use_layerwise", 0, False),
        ("lmcache_worker_ports", 8000, [8000]),
        ("lmcache_worker_ports", "1, 2", [1, 2]),
        ("lmcache_worker_ports", [1, 2], [1, 2]),
        ("blend_thresholds", [1, 0.5], [1.0, 0.5]),
        ("storage_plugins", "a,b", ["a", "b"]),
        ("remote_url", None, None),
        ("cache_policy", "lfu", "lfu"),
        ("pd_allocation_timeout_sec", float("inf"), float("inf")),
        ("extra_config", '{"a": 1}', {"a": 1}),
    ],
)
def test_what_lmcache_converts_rightly_is_accepted(tmp_path: Path, name: str, value: Any, result: Any) -> None:
    config = load(tmp_path, yaml.safe_dump({f"ec_{name}": value})).storage.lmcache_config
    assert getattr(config, name) == result
    assert type(getattr(config, name)) is type(result)


def test_lmcaches_defaults_pass_our_checks(tmp_path: Path) -> None:
    defaults = load_settings({}, {}).storage.lmcache_config.to_dict()
    assert load(tmp_path, yaml.safe_dump(defaults)).storage.lmcache_config.to_dict() == defaults


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("namespace", "a@b", "letters, digits"),
        ("namespace", "a/b", "letters, digits"),
        ("namespace", "a" * 65, "at most 64"),
        ("namespace", None, "letters, digits"),
        ("persist_client_ids", "true", "true or false"),
        ("reset_invalidates", 1, "true or false"),
        ("weight_fingerprint", "never", "one of sample, none"),
        ("staging_deadline_seconds", 0, "a number and above 0"),
        ("staging_deadline_seconds", float("inf"), "a number and above 0"),
        ("staging_deadline_seconds", -1.0, "a number and above 0"),
        ("staging_deadline_seconds", "2", "a number and above 0"),
        ("max_lease_fraction", 1.5, "a number and above 0 and at most 1"),
        ("io_threads", 65, "an integer and at least 1 and at most 64"),
        ("io_threads", 4.5, "an integer"),
        ("io_threads", True, "an integer"),
        ("transfer_slots", 63, "an integer and at least 64 and at most 65536"),
        ("weight_fingerprint", "all", "one of sample, none"),
    ],
)
def test_a_wrong_behaviour_value_is_an_error_everywhere(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    text = message(tmp_path, extra={name: value})
    assert f"{name} = {value!r} (from ec_connector_extra_config)" in text
    assert f"allowed is {allowed}" in text or allowed in text
    nested = message(tmp_path, yaml.safe_dump({"extra_config": {f"ec.{name}": value}}))
    assert f"{name} = {value!r} (from " in nested
    assert "lmcache.yaml" in nested


def test_every_wrong_behaviour_value_is_named_at_once(tmp_path: Path) -> None:
    text = message(tmp_path, extra={"io_threads": 0, "namespace": "@"})
    assert "io_threads = 0" in text
    assert "namespace = '@'" in text


def test_a_queue_shorter_than_its_threads_is_an_error(tmp_path: Path) -> None:
    text = message(tmp_path, "extra_config: {ec.io_threads: 8}", {"io_queue_items": 2})
    assert "io_queue_items = 2" in text
    assert "lmcache.yaml, extra_config: ec.io_threads" in text
    assert "ec_connector_extra_config" in text


def test_behaviour_is_frozen_and_documented() -> None:
    with pytest.raises(ValueError, match="frozen"):
        BehaviourSettings().io_threads = 3
    assert all(field.description for field in BehaviourSettings.model_fields.values())
    assert not set(FIELDS) & lmcache_names()


def test_use_odirect_is_no_text(tmp_path: Path) -> None:
    # LMCache would take the text "false" for true.
    assert "use_odirect = 'false'" in message(tmp_path, 'extra_config: {use_odirect: "false"}')
    assert "Write it as use_odirect under extra_config" in message(tmp_path, "use_odirect: true")


def test_credentials_stay_out_of_messages(tmp_path: Path) -> None:
    assert "hunter2" not in message(tmp_path, LMCACHE_EXTRA_CONFIG='{"password": "hunter2"')


def test_a_combination_that_lmcache_refuses_is_a_settings_error(tmp_path: Path) -> None:
    assert "min_retrieve_tokens" in message(tmp_path, "min_retrieve_tokens: -1")
    assert "pd_role" in message(tmp_path, "enable_pd: true")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a", "list"),
        ("just words", "str"),
        ("a: [", "not a valid YAML file"),
        ("on: 1", "True"),
        ("ec: 5", "ec = 5"),
        ("ec: {max_local_cpu_siz: 5}", "max_local_cpu_siz"),
        ("ec: {1: 5}", "'1'"),
    ],
)
def test_a_broken_file_is_an_error_with_its_path(tmp_path: Path, text: str, part: str) -> None:
    found = message(tmp_path, text)
    assert part in found
    assert "lmcache.yaml" in found


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(SettingsError, match=r"binary\.yaml"):
        load_settings({"config_file": str(file)}, {})


@pytest.mark.parametrize("path", ["absent.yaml", "."])
def test_an_unreadable_file_is_an_error_that_names_its_source(tmp_path: Path, path: str) -> None:
    file = str(tmp_path / path)
    with pytest.raises(SettingsError, match=r"config_file = .* \(from ec_connector_extra_config\)"):
        load_settings({"config_file": file}, {})
    with pytest.raises(SettingsError, match="from environment variable LMCACHE_CONFIG_FILE"):
        load_settings({}, {"LMCACHE_CONFIG_FILE": file})
    with pytest.raises(SettingsError, match="config_file = 5"):
        load_settings({"config_file": 5}, {})


# What the machine can hold


def storage(directory: Path | None = None, pool_bytes: int = 4096, disk_bytes: int = 4096) -> StorageSettings:
    origins = dict.fromkeys(("max_local_cpu_size", "local_disk", "max_local_disk_size"), "here")
    return StorageSettings(pool_bytes, directory, disk_bytes, False, None, origins)


def refusal(wanted: StorageSettings, shm_dir: Path = Path("/dev/shm")) -> str:
    with pytest.raises(SettingsError) as caught:
        check_capacity(wanted, shm_dir)
    return str(caught.value)


def test_what_fits_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check_capacity(storage())
    check_capacity(storage(tmp_path / "cache"), tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_pool_larger_than_shared_memory_is_refused() -> None:
    text = refusal(storage(pool_bytes=2**50))
    assert "max_local_cpu_size = 1048576.0 (from here)" in text
    assert re.search(r"allowed is at most [\d.]+ [GMK]iB, what /dev/shm has free", text)


def test_absent_shared_memory_is_refused(tmp_path: Path) -> None:
    assert "max_local_cpu_size" in refusal(storage(), tmp_path / "absent")


def test_directories_are_created_private(tmp_path: Path) -> None:
    check_capacity(storage(tmp_path / "a" / "b"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    check_capacity(storage(tmp_path / "a"))
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_path_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    text = refusal(storage(tmp_path / "file" / below))
    assert f"local_disk = '{tmp_path / 'file' / below}' (from here)" in text
    assert "Not a directory" in text


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    assert "local_disk" in refusal(storage(tmp_path / "link"))


def test_a_directory_that_takes_no_files_is_refused_even_for_root() -> None:
    # /proc refuses everybody, whatever its permission bits say.
    assert "local_disk = '/proc/cache'" in refusal(storage(Path("/proc/cache")))
    assert "local_disk = '/proc'" in refusal(storage(Path("/proc")))


def test_a_disk_budget_counts_what_is_free_and_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "item.pt").write_bytes(bytes(64 * 1024))
    monkeypatch.setattr("connector.capacity._free_bytes", lambda _: 16 * 1024)
    check_capacity(storage(tmp_path, disk_bytes=80 * 1024))
    text = refusal(storage(tmp_path, disk_bytes=84 * 1024))
    assert f"max_local_disk_size = {84 / 1024**2} (from here)" in text
    assert "allowed is at most 80 KiB, what is free" in text


def test_a_disk_filled_by_the_cache_itself_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "item.pt").write_bytes(bytes(64 * 1024))
    free = {Path("/dev/shm"): GIB}
    monkeypatch.setattr("connector.capacity._free_bytes", lambda path: free.get(path, 0))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("connector.capacity.tempfile.NamedTemporaryFile", full)
    check_capacity(storage(tmp_path, disk_bytes=64 * 1024))
    assert "max_local_disk_size" in refusal(storage(tmp_path, disk_bytes=65 * 1024))


# What is shown and shipped


def test_the_description_has_units_and_origins(tmp_path: Path) -> None:
    settings = load(tmp_path, "max_local_cpu_size: 1.5\nlocal_disk: /a\nmax_local_disk_size: 8", {"io_threads": 8})
    rows = {name: (value, origin) for name, value, origin in describe(settings)}
    file = str(tmp_path / "lmcache.yaml")
    assert rows["max_local_cpu_size"] == ("1.5 GiB", file)
    assert rows["local_disk"] == ("/a", file)
    assert rows["max_local_disk_size"] == ("8 GiB", file)
    assert rows["use_odirect"] == ("false", "default")
    assert rows["save_queue_bytes"] == ("512 MiB", "default")
    assert rows["staging_deadline_seconds"] == ("2 s", "default")
    assert rows["io_threads"] == ("8", "ec_connector_extra_config")
    assert rows["namespace"] == ("none", "default")
    assert set(FIELDS) < set(rows)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_files_load(file: Path, warnings: list[str]) -> None:
    settings = load_settings({"config_file": str(file)}, {})
    assert warnings == []
    assert settings.storage.pool_bytes >= GIB
    assert settings.storage.disk_directory is not None
    assert settings.storage.disk_bytes > settings.storage.pool_bytes


def test_the_three_files_are_shipped() -> None:
    assert {"laptop", "neuron-server", "shared-disk"} <= {path.stem for path in CONFIGS.glob("*.yaml")}
