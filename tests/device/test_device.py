# SPDX-License-Identifier: Apache-2.0
"""The device checks under pytest, where there is a device."""

from collections.abc import Callable

import pytest
import torch

from tests.device.check_device import CHECKS, NO_DEVICE, device, main

needs_device = pytest.mark.skipif(device() is None, reason=NO_DEVICE)


@needs_device
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device(check: Callable[[torch.device], str]) -> None:
    on = device()
    assert on is not None
    print(check(on))


@pytest.mark.skipif(device() is not None, reason="there is a device")
def test_the_script_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    assert capsys.readouterr().out.strip() == NO_DEVICE
