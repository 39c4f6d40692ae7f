# SPDX-License-Identifier: Apache-2.0
"""A disk that takes as long per read as a file says, for servers started with this directory on PYTHONPATH.

vLLM loads it as a general plugin, by the entry point that lies beside it; it acts in the engine core alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

DELAY_VARIABLE = "SLOW_DISK_SECONDS_FILE"


def register() -> None:
    """Make every read of the disk tier sleep for as many seconds as the file holds at that moment."""
    if DELAY_VARIABLE not in os.environ or not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from storage_tiers.disk_tier import DiskTier

    control = Path(os.environ[DELAY_VARIABLE])
    read_into = DiskTier.read_into

    def slow_read_into(self: DiskTier, *arguments: Any) -> bool:
        time.sleep(float(control.read_text()))
        return read_into(self, *arguments)

    DiskTier.read_into = slow_read_into  # type: ignore[method-assign]
