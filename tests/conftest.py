# SPDX-License-Identifier: Apache-2.0
"""What tests in several folders share: the one server without a connector."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.engine.checkpoint import checkpoint
from tests.engine.server import ROOT, VllmServer


@pytest.fixture(scope="session")
def plain_server() -> Iterator[VllmServer]:
    """A server without a connector, for the whole session. When it is stopped, nothing of it may be left."""
    running = VllmServer(checkpoint(ROOT / "build" / "models"), ROOT / "build" / "tests" / "plain").start()
    yield running
    pids = running.pids
    assert len(pids) >= 3
    running.stop()
    assert running.pids == []
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
