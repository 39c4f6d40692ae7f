# SPDX-License-Identifier: Apache-2.0
"""Equal facts give equal fingerprints in every process; anything that changes the bytes changes the fingerprint."""

import enum
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage_tiers.fingerprint import fingerprint_of, sample_weight_files, with_adapter, with_epoch

FACTS = {"model": "org/m", "vision": {"depth": 2, "patch": [14, 14]}, "scale": 0.5, "lora": None, "quantized": False}


def test_order_does_not_matter_and_values_do() -> None:
    print_ = fingerprint_of(FACTS)
    assert len(print_) == 64
    assert fingerprint_of(dict(reversed(FACTS.items()))) == print_
    assert fingerprint_of(FACTS | {"vision": {"patch": [14, 14], "depth": 2}}) == print_
    for change in ({"model": "org/n"}, {"vision": {"depth": 3, "patch": [14, 14]}}, {"lora": False}, {"more": None}):
        assert fingerprint_of(FACTS | change) != print_


def test_every_process_agrees() -> None:
    """Whatever PYTHONHASHSEED."""
    code = f"from storage_tiers.fingerprint import fingerprint_of; print(fingerprint_of({FACTS!r}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {fingerprint_of(FACTS)}


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"a\.b\[1\]"),
        ({"path": Path("x")}, "path"),
        ({"colour": Colour.RED}, "colour"),
        ({"n": float("nan")}, "n"),
        ({"a": {1: 2}}, "a"),
    ],
)
def test_what_is_no_json_is_named(facts: dict[str, object], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        fingerprint_of(facts)


def test_an_epoch_changes_it_for_good() -> None:
    base = fingerprint_of(FACTS)
    assert len({base, with_epoch(base, "a"), with_epoch(base, "b"), with_epoch(with_epoch(base, "a"), "b")}) == 4
    assert with_epoch(base, "a") == with_epoch(base, "a")


def weights(directory: Path, nbytes: int = 1 << 20) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "model-00001.safetensors").write_bytes(os.urandom(nbytes))
    (directory / "model-00002.safetensors").write_bytes(b"small")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("offset", [0, 1 << 19, (1 << 20) - 1])
def test_changed_weights_change_the_sample(tmp_path: Path, offset: int) -> None:
    directory = weights(tmp_path)
    before = sample_weight_files(directory)
    assert list(before) == ["model-00001.safetensors", "model-00002.safetensors"]
    with (directory / "model-00001.safetensors").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    after = sample_weight_files(directory)
    assert after["model-00001.safetensors"] != before["model-00001.safetensors"]
    assert after["model-00002.safetensors"] == before["model-00002.safetensors"]


def test_a_hub_id_or_nothing_has_no_weights(tmp_path: Path) -> None:
    assert sample_weight_files(Path("Qwen/Qwen3-VL-8B-Instruct")) == {}
    assert sample_weight_files(tmp_path / "missing") == {}


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(1 << 40)
    assert sample_weight_files(tmp_path)["huge.bin"]["bytes"] == 1 << 40


def test_another_adapter_under_the_same_path(tmp_path: Path) -> None:
    adapter = weights(tmp_path / "lora")
    config = adapter / "adapter_config.json"
    config.write_text('{"lora_alpha": 16}')
    first = with_adapter("base", adapter)
    assert with_adapter("base", adapter) == first
    config.write_text('{"lora_alpha": 32}')
    second = with_adapter("base", adapter)
    weights(adapter)
    third = with_adapter("base", adapter)
    assert len({first, second, third, with_adapter("other base", adapter), with_adapter("base", "org/lora")}) == 5
