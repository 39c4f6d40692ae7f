# SPDX-License-Identifier: Apache-2.0
"""Each scene is played once per session; the tests look at what was seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e import scenes
from tests.engine.server import ROOT, VllmServer


def _fresh(name: str) -> Path:
    base = ROOT / "build" / "tests" / name
    shutil.rmtree(base, ignore_errors=True)
    return base


@pytest.fixture(scope="session")
def plain(plain_server: VllmServer) -> scenes.Seen:
    """Every item, asked of a server without a connector."""
    return scenes.ask_all(plain_server, range(scenes.ITEMS + 1))


@pytest.fixture(scope="session")
def restarted() -> scenes.Restarted:
    """A server that is killed and started again on the same directory."""
    return scenes.restart_scene(_fresh("restart"))


@pytest.fixture(scope="session")
def tensor_parallel() -> scenes.TensorParallel:
    """Two ranks."""
    return scenes.tensor_parallel_scene(_fresh("tensor_parallel"))


@pytest.fixture(scope="session")
def disaggregated() -> scenes.Disaggregated:
    """A producer, then a consumer."""
    return scenes.disaggregated_scene(_fresh("disaggregated"))


@pytest.fixture(scope="session")
def in_blocks(plain: scenes.Seen, plain_server: VllmServer) -> scenes.InBlocks:
    """A device cache in blocks. `plain` comes first: it counts what a server encodes that has seen nothing."""
    assert plain.runs
    return scenes.blocks_scene(_fresh("blocks"), plain_server)
