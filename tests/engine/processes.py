# SPDX-License-Identifier: Apache-2.0
"""End a process that was started here, and everything that it started, and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess

import psutil


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the living processes of a process that leads a session of its own: itself and all below it.

    A process whose parent has gone stays in the session, so it is found as well.
    """
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(candidate.pid) == process.pid and candidate.status() != psutil.STATUS_ZOMBIE:
                found.append(candidate)
    return found


def end(process: subprocess.Popen[bytes], grace_s: float) -> bool:
    """Ask the process to end, and kill what is left of its session after `grace_s` seconds; 0 kills at once.

    Returns:
        True if all ended when asked, False if something had to be killed.
    """
    members = family(process)
    if grace_s > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        _, members = psutil.wait_procs(members, timeout=min(grace_s, 5.0))
    left = {member.pid: member for member in [*members, *family(process)] if member.is_running()}
    for member in left.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(list(left.values()), timeout=10.0)
    process.wait(10.0)
    return not left
