# SPDX-License-Identifier: Apache-2.0
"""Keeps the hosts quiet, so that tables can be read, and makes what several benchmarks share."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when LMCache and vLLM are imported, which is why nothing of ours is imported above.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def full_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with 100,000 items of `many.py`, removed afterwards: pytest would keep it."""
    from tests.benchmarks.many import MANY, plant
    from tests.benchmarks.rig import model_fingerprint

    directory = tmp_path_factory.mktemp("many")
    plant(directory, model_fingerprint(), MANY)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session", autouse=True)
def _unfrozen() -> Iterator[None]:
    """Give back to the collector what `settle_memory` took from it, or extensions complain of leaks at exit."""
    yield
    gc.unfreeze()
