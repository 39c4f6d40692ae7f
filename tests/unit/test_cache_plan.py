# SPDX-License-Identifier: Apache-2.0
"""`ec-cache plan`: its arithmetic, what it reads, and what it says of a model that it cannot plan for."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from connector.cache_plan import EncoderShape, ItemSize, PlanError, TierSizes, plan_for, read_encoder
from connector.cli import main

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
QWEN3 = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [8, 16, 24]}
QWEN25 = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 1280}
SHAPE_8B = EncoderShape(4096, 3, 16, 2, 2)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def write_model(directory: Path, vision: dict[str, Any] | None, **rest: Any) -> Path:
    directory.mkdir(parents=True)
    config = {"model_type": "any", **rest} | ({} if vision is None else {"vision_config": vision})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def as_json(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = plan(*arguments, "--format", "json")
    assert result.exit_code == status, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


# Bytes and tokens.


@pytest.mark.parametrize(("out_hidden_size", "kib"), [(2048, 16), (4096, 32), (5120, 40)], ids=["2B", "8B", "32B"])
def test_bytes_of_a_token_of_qwen3_vl(tmp_path: Path, out_hidden_size: int, kib: int) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": out_hidden_size})
    value = as_json(model)
    assert value["bytes_per_token"] == kib * KIB
    tokens = {item["name"]: item["tokens"] for item in value["items"]}
    assert tokens == {"512x512": 256, "1024x1024": 1024, "video:8x448x448": 4 * 14 * 14}
    assert [item["payload_bytes"] for item in value["items"]] == [count * kib * KIB for count in tokens.values()]


def test_a_model_without_deepstack(tmp_path: Path) -> None:
    value = as_json(write_model(tmp_path / "model", QWEN25 | {"out_hidden_size": 3584}), "--item", "1024x1024")
    assert value["bytes_per_token"] == 3584 * 2
    # 1024 / 28 is 36.6, and the processor makes 37 of it.
    assert value["items"][0]["tokens"] == 37 * 37


@pytest.mark.parametrize("rest", [{"hidden_size": 1536}, {"text_config": {"hidden_size": 1536}}])
def test_a_tower_that_does_not_say_how_wide_it_is(tmp_path: Path, rest: dict[str, Any]) -> None:
    """As wide as the language model, never as its own inner layers."""
    assert read_encoder(str(write_model(tmp_path / "model", QWEN25, **rest))).bytes_per_token == 3072


@pytest.mark.parametrize(
    ("text", "tokens"), [("1x1", 1), ("512x1024", 512), ("video:1x32x32", 1), ("video:9x64x32", 10)]
)
def test_tokens_of_small_and_odd_items(text: str, tokens: int) -> None:
    assert SHAPE_8B.tokens_of(ItemSize.parsed(text)) == tokens


@pytest.mark.parametrize("text", ["", "1024", "1024x", "0x10", "video:448x448", "video:0x1x1", "8x448x448", "1e3x1e3"])
def test_items_that_cannot_be_read(text: str) -> None:
    with pytest.raises(PlanError, match="1024x1024"):
        ItemSize.parsed(text)


# What the tiers hold.


def test_what_each_tier_holds() -> None:
    tiers = TierSizes(block_size=256, num_blocks=9, pool_bytes=GIB, lease_bytes=GIB // 2, disk_bytes=2 * GIB)
    one = plan_for("org/model", SHAPE_8B, tiers, ["1024x1024"], {})
    (item,) = one.items
    assert (item.blocks, item.device, item.pool) == (4, 2, 32)
    assert item.disk == 63  # 64 without their trailers
    assert (one.block_bytes, one.device_bytes) == (8 * MIB, 72 * MIB)
    assert one.problems == ()


def test_whole_blocks_count() -> None:
    tiers = TierSizes(block_size=256, num_blocks=9, pool_bytes=GIB, lease_bytes=GIB, disk_bytes=0)
    (item,) = plan_for("org/model", SHAPE_8B, tiers, ["video:8x448x448"], {}).items
    assert (item.tokens, item.blocks, item.device, item.disk) == (784, 4, 2, None)


def test_sizes_come_from_the_configuration_and_options_go_before_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 4096})
    config = tmp_path / "ec.yaml"
    config.write_text(
        f"max_local_cpu_size: 2.0\nlocal_disk: {tmp_path / 'disk'}\nmax_local_disk_size: 4.0\n"
        "extra_config:\n  ec.device_block_size: 512\n  ec.device_num_blocks: 33\n"
    )
    value = as_json(model, "--config", config)
    assert value["tiers"] == {
        "block_size": 512,
        "num_blocks": 33,
        "pool_bytes": 2 * GIB,
        "lease_bytes": GIB,
        "disk_bytes": 4 * GIB,
    }
    extra = json.loads(value["flags"][1])["ec_connector_extra_config"]
    assert extra == {"config_file": str(config)}, "what the file says has not to be said twice"
    assert as_json(model, "--config", config, "--block-size", 128, "--num-blocks", 9)["device_bytes"] == 36 * MIB
    assert not (tmp_path / "disk").exists()


def test_blocks_that_nobody_has_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 2048})
    value = as_json(model)
    assert (value["device_bytes"], value["items"][0]["device"], value["items"][0]["disk"]) == (None, None, None)
    assert "--num-blocks" in plan(model).stdout


def test_an_item_that_a_tier_cannot_hold_is_status_1(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 4096})
    config = tmp_path / "ec.yaml"
    config.write_text(f"max_local_cpu_size: 0.05\nlocal_disk: {tmp_path / 'disk'}\nmax_local_disk_size: 0.03\n")
    arguments = (model, "--config", config, "--num-blocks", 3, "--item", "1024x1024", "--item", "64x64")
    value = as_json(*arguments, status=1)
    device, pool, disk = value["problems"]
    assert "--num-blocks 5" in device
    assert "max_local_cpu_size" in pool, "it fits the pool, but not what requests may hold of it"
    assert "max_local_disk_size" in disk
    assert [line for line in plan(*arguments).stdout.splitlines() if line.startswith("! 64x64")] == []


# The flags.


def test_flags_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a model", QWEN3 | {"out_hidden_size": 4096})
    shown = plan(model / "config.json", "--num-blocks", 65, "--block-size", 128).stdout
    words = shlex.split(shown[shown.index("vllm serve") :].replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", str(model)]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(flags["--ec-transfer-config"]) == {
        "ec_connector": "LMCacheNeuronECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"device_block_size": 128, "device_num_blocks": 65},
    }
    assert flags["--worker-cls"] == "connector.workers.BlockCacheWorker"
    assert json.loads(flags["--ec-manager-config"]) == {
        "encoder_cache_manager_cls": "connector.BlockAwareEncoderCacheManager"
    }


def test_a_configuration_of_the_environment_is_named_in_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 4096})
    config = tmp_path / "ec.yaml"
    config.write_text("max_local_cpu_size: 2.0\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(config))
    value = as_json(model)
    assert value["tiers"]["pool_bytes"] == 2 * GIB
    assert str(config) in value["command"]


# Where models are found.


def cached(hub: Path, revision: str, out_hidden_size: int) -> Path:
    repository = hub / "models--org--model"
    write_model(repository / "snapshots" / revision, QWEN3 | {"out_hidden_size": out_hidden_size})
    return repository


def test_a_model_of_the_local_cache(tmp_path: Path) -> None:
    cached(tmp_path / "hub", "old", 2048)
    repository = cached(tmp_path / "hub", "new", 4096)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("old\n")
    value = as_json("org/model")
    assert value["bytes_per_token"] == 16 * KIB, "that which the main branch names"
    assert value["command"].startswith("vllm serve org/model ")


def test_the_cache_is_where_hugging_face_keeps_it(tmp_path: Path) -> None:
    cached(tmp_path / "home" / "hub", "only", 4096)
    for environ in (
        {"HF_HUB_CACHE": str(tmp_path / "home" / "hub"), "HF_HOME": "/no/such"},
        {"HF_HOME": str(tmp_path / "home")},
    ):
        assert read_encoder("org/model", environ).bytes_per_token == 32 * KIB
    (tmp_path / "home").rename(tmp_path / "huggingface")
    assert read_encoder("org/model", {"XDG_CACHE_HOME": str(tmp_path)}).bytes_per_token == 32 * KIB


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        (None, ["config.json has no vision_config", "a model with a vision encoder"]),
        (QWEN25, ["has no out_hidden_size", "copy of config.json"]),
        ({"out_hidden_size": 8, "spatial_merge_size": 2}, ["has no patch_size"]),
        ({"out_hidden_size": 8, "patch_size": 14}, ["has no spatial_merge_size", "Qwen"]),
        (QWEN3 | {"out_hidden_size": "wide"}, ["'wide'", "an integer above 0"]),
        (QWEN3 | {"out_hidden_size": 8, "deepstack_visual_indexes": 3}, ["deepstack_visual_indexes", "a list"]),
        (
            {"out_hidden_size": 8, "patch_size": 14, "spatial_merge_size": 2},
            ["no temporal_patch_size", "video:8x448x448", "--item"],
        ),
    ],
)
def test_a_model_that_cannot_be_planned_for(tmp_path: Path, vision: dict[str, Any] | None, words: list[str]) -> None:
    result = plan(write_model(tmp_path / "model", vision))
    assert result.exit_code == 2
    assert [word for word in words if word not in result.stderr] == []
    assert result.stdout == ""


def test_unusable_arguments(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("{")
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 4096})
    for arguments, words in (
        ([tmp_path / "absent"], ["absent does not exist", "config.json"]),
        ([tmp_path / "empty"], ["empty has no config.json"]),
        ([tmp_path / "text.json"], ["text.json is no JSON"]),
        (["org/absent"], [str(tmp_path / "hub"), "hf download org/absent config.json"]),
        ([model, "--item", "huge"], ["'huge'", "video:8x448x448"]),
        ([model, "--config", "/no/such.yaml"], ["/no/such.yaml"]),
        ([model, "--num-blocks", 1], ["--num-blocks"]),
        ([model, "--output", "/no/such/file"], ["/no/such", "name another"]),
    ):
        result = plan(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert [word for word in words if word not in result.stderr] == []


def test_planning_does_not_import_vllm(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3 | {"out_hidden_size": 4096})
    code = (
        f"import sys; from connector.cli import main; main(['plan', {str(model)!r}], standalone_mode=False); "
        "print([name for name in ('vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
