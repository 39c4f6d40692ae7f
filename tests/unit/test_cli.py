# SPDX-License-Identifier: Apache-2.0
"""`ec-cache`: what it prints and the status it ends with. What it does to a directory: `test_disk_maintenance.py`."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from connector.cli import main
from tests.tiers.contract import Damage, make_item
from tests.tiers.disk_rig import ITEM_BYTES, DiskRig, opened, served

HASH = "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    """An old entry and a new one, by fingerprint and use, and one of LMCache's own."""
    rig = DiskRig(tmp_path / "cache")
    rig.directory.mkdir()
    rig.plant(make_item(HASH, fingerprint="0ld" * 10))
    rig.plant(make_item("young", modality="video", fingerprint="new" * 10))
    rig.plant_foreign("theirs", bytes(100))
    yield rig
    rig.close()


def ec_cache(rig: DiskRig, *arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--directory", str(rig.directory)])


def as_json(rig: DiskRig, *arguments: object, status: int = 0) -> dict[str, Any]:
    result = ec_cache(rig, *arguments, "--format", "json")
    assert result.exit_code == status, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    assert value["directory"] == str(rig.directory)
    return value


# What all commands have.


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from connector.cli import main; main(['--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'lmcache', 'vllm', 'pydantic', 'storage_tiers') if name in sys.modules])"
    )
    assert run(code).splitlines()[-1] == "[]"


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"ec-cache": "connector.cli:main"}
    assert any(requirement.startswith("click>=") for requirement in project["dependencies"])


def test_commands_on_a_directory_do_not_import_vllm(rig: DiskRig) -> None:
    code = (
        f"import sys; from connector.cli import main; main(['list', '--directory', {str(rig.directory)!r}], "
        "standalone_mode=False); print('vllm' in sys.modules, 'lmcache.v1.config' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "False False"


def test_as_a_real_process(rig: DiskRig) -> None:
    """Nothing but the report is on stdout, the progress is on stderr, and the status is the process's."""
    rig.damage("young", Damage.FLIPPED_PAYLOAD)
    command = [sys.executable, "-m", "connector.cli", "verify", "--directory", str(rig.directory), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [row["key"] for row in json.loads(done.stdout)["bad"]] == ["young"]
    assert done.stderr == f"verified 3 of 3 entries, {24 + 100 / 1024:.4g} KiB\n"


def test_the_report_goes_into_a_file_as_well(rig: DiskRig, tmp_path: Path) -> None:
    result = ec_cache(rig, "stats", "--format", "json", "--output", tmp_path / "report")
    assert (tmp_path / "report").read_text() == result.stdout
    quiet = ec_cache(rig, "verify", "--quiet", "--output", tmp_path / "report")
    assert quiet.output == ""
    assert "2 ok" in (tmp_path / "report").read_text()


def test_the_directory_of_a_configuration_and_its_budget(rig: DiskRig, tmp_path: Path) -> None:
    config = tmp_path / "ec.yaml"
    config.write_text(f"local_disk: {rig.directory}\nmax_local_disk_size: 2.0\n")
    result = CliRunner().invoke(main, ["stats", "--config", str(config), "--format", "json"])
    value = json.loads(result.stdout)
    assert (value["directory"], value["budget_bytes"], value["total"]["entries"]) == (str(rig.directory), 2 << 30, 3)


def test_without_options_the_directory_is_the_one_that_a_server_would_use(
    rig: DiskRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ec.yaml"
    config.write_text(f"local_disk: {rig.directory}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(config))
    assert str(rig.directory) in CliRunner().invoke(main, ["stats", "--format", "json"]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--directory", "/no/such"], ["/no/such does not exist", "local_disk"]),
        (["list"], ["no cache directory is named", "--directory"]),
        (["list", "--config", "/no/such.yaml"], ["/no/such.yaml"]),
        (["list", "--output", "/no/such/file", "--directory", "/"], ["/no/such", "name another"]),
        (["frobnicate"], ["No such command", "frobnicate"]),
        (["list", "--sort", "colour", "--directory", "/"], ["colour", "used"]),
        (["prune", "--max-size", "8 parsecs", "--directory", "/"], ["8 parsecs", "8GiB"]),
        (["prune", "--older-than", "7", "--directory", "/"], ["'7'", "7d"]),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_would_help(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert [word for word in words if word not in result.stderr] == []
    assert result.stdout == ""


# One by one.


def test_list(rig: DiskRig) -> None:
    value = as_json(rig, "list", "--sort", "size")
    assert [row["state"] for row in value["entries"]] == ["ok", "ok", "unverified"]
    assert (value["total_entries"], value["total_bytes"]) == (3, 2 * ITEM_BYTES + 100)
    (young,) = [row for row in value["entries"] if row["key"] == "young"]
    assert young["shape"] == [4, 1000]
    assert (young["model"], young["dtype"], young["modality"]) == ("org/model", "bfloat16", "video")
    assert (young["payload_bytes"], young["file_bytes"], young["created"]) == (8000, ITEM_BYTES, 1.5)
    assert len(as_json(rig, "list", "--limit", 1)["entries"]) == 1
    shown = ec_cache(rig, "list", "--sort", "key").stdout
    assert [
        word for word in (HASH, "0ld0ld0ld0ld ", "4x1000", "12 KiB", "unverified", "3 of 3") if word not in shown
    ] == []


def test_an_empty_directory(rig: DiskRig) -> None:
    for path in rig.entries():
        path.unlink()
    for command in (["list"], ["stats"], ["verify", "--fix"], ["prune", "--max-size", "0"]):
        assert ec_cache(rig, *command).exit_code == 0


def test_describe(rig: DiskRig) -> None:
    value = as_json(rig, "describe", HASH[:6])
    assert (value["key"], value["digest_matches"], value["state"]) == (HASH, True, "ok")
    assert value["digest"] == make_item(HASH, fingerprint="0ld" * 10)[0].digest.hex()
    rig.damage(HASH, Damage.FLIPPED_PAYLOAD)
    assert as_json(rig, "describe", rig.path(HASH).name, status=1)["digest_matches"] is False
    assert "payload does not match its digest" in ec_cache(rig, "describe", HASH).stdout
    theirs = as_json(rig, "describe", rig.path("theirs").name)
    assert (theirs["digest_matches"], theirs["state"], theirs["dtype"]) == (None, "unverified", "bfloat16")


def test_a_key_that_names_nothing(rig: DiskRig) -> None:
    for command in ("describe", "evict"):
        result = ec_cache(rig, command, "nope")
        assert result.exit_code == 2
        assert "no entry is named by 'nope'" in result.stderr


def test_stats(rig: DiskRig) -> None:
    value = as_json(rig, "stats")
    assert value["total"] == {"entries": 3, "nbytes": 2 * ITEM_BYTES + 100}
    assert value["by_model"] == {"org/model": {"entries": 2, "nbytes": 2 * ITEM_BYTES}}
    assert set(value["by_modality"]) == {"image", "video"}
    assert value["unverified"]["entries"] == 1
    assert value["budget_bytes"] is None
    assert "org/model  2" in ec_cache(rig, "stats").stdout


def test_verify_and_fix(rig: DiskRig) -> None:
    assert as_json(rig, "verify")["bad"] == []
    rig.damage("young", Damage.FLIPPED_TRAILER)
    (bad,) = as_json(rig, "verify", status=1)["bad"]
    assert (bad["file_name"], bad["problem"], bad["removed"]) == (rig.path("young").name, "trailer", False)
    fixed = ec_cache(rig, "verify", "--fix")
    assert fixed.exit_code == 1
    assert "trailer does not match its digest (removed)" in fixed.stdout
    assert not rig.holds("young")
    assert as_json(rig, "verify", "--fix") | {"directory": 0} == {
        "directory": 0,
        "checked": 2,
        "ok": 1,
        "unverified": 1,
        "removed": 0,
        "bad": [],
    }
    assert len(as_json(rig, "verify", "--strict", status=1)["bad"]) == 1
    assert opened(rig).probe(make_item(HASH, fingerprint="0ld" * 10)[0].as_wanted()) is not None


def test_prune(rig: DiskRig) -> None:
    planned = as_json(rig, "prune", "--fingerprint", "0ld", "--dry-run")
    assert (planned["counts"], planned["bytes"]) == ({"planned": 1}, ITEM_BYTES)
    assert rig.holds(HASH)
    assert as_json(rig, "prune", "--older-than", "1h")["counts"] == {}
    assert as_json(rig, "prune", "--not-fingerprint", "new")["removals"][0]["file_name"] == rig.path(HASH).name
    assert as_json(rig, "prune", "--max-size", "12KiB")["counts"] == {"removed": 1}
    assert rig.used() == 100
    nothing = ec_cache(rig, "prune")
    assert nothing.exit_code == 2
    assert "--max-size" in nothing.stderr


def test_a_removal_that_fails_is_status_1(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: object, name: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("storage_tiers.disk_directory.CacheDirectory.unlink", refusing)
    result = ec_cache(rig, "evict", HASH)
    assert result.exit_code == 1
    assert "failed" in result.stdout
    assert "Permission denied" in result.stdout


def test_evict(rig: DiskRig) -> None:
    assert as_json(rig, "evict", HASH[:8])["bytes"] == ITEM_BYTES
    assert not rig.holds(HASH)
    assert len(rig.entries()) == 2


@pytest.mark.parametrize("name", ["moved.tar", "moved"])
def test_export_and_import(rig: DiskRig, tmp_path: Path, name: str) -> None:
    exported = as_json(rig, "export", tmp_path / name)
    assert exported["counts"] == {"copied": 2, "unverified": 1}
    other = DiskRig(tmp_path / "new" / "machine")
    assert as_json(other, "import", tmp_path / name, "young")["counts"] == {"copied": 1}
    assert as_json(other, "import", tmp_path / name)["counts"] == {"copied": 1, "exists": 1}
    assert as_json(other, "verify", "--strict")["ok"] == 2
    other.close()


def test_a_damaged_entry_is_not_imported(rig: DiskRig, tmp_path: Path) -> None:
    rig.damage("young", Damage.FLIPPED_PAYLOAD)
    other = DiskRig(tmp_path / "other")
    result = as_json(other, "import", rig.directory, status=1)
    assert result["counts"] == {"copied": 1, "bad": 1, "unverified": 1}
    assert not served(other.open(), "young")
    other.close()


def test_import_within_the_budget_of_a_configuration(rig: DiskRig, tmp_path: Path) -> None:
    config = tmp_path / "ec.yaml"
    config.write_text(f"local_disk: {tmp_path / 'other'}\nmax_local_disk_size: {ITEM_BYTES / (1 << 30)}\n")
    result = CliRunner().invoke(main, ["import", str(rig.directory), "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "other").glob("*.pt"))) == 1


def test_unusable_sources_and_destinations(rig: DiskRig, tmp_path: Path) -> None:
    (tmp_path / "no.tar").write_text("this is no archive" * 100)
    ec_cache(rig, "export", tmp_path / "cut.tar")
    os.truncate(tmp_path / "cut.tar", 20_000)
    for arguments, words in (
        (["import", tmp_path / "no.tar"], "no.tar is no whole tar file"),
        (["import", tmp_path / "cut.tar"], "cut.tar is no whole tar file"),
        (["import", tmp_path / "absent"], "absent does not exist"),
        (["import", rig.directory], "name another one"),
        (["export", rig.directory], "name another one"),
        (["export", tmp_path / "no.tar"], "exists; remove it"),
    ):
        result = ec_cache(rig, *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
