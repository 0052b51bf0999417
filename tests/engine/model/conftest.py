"""Limits torch to one thread: tiny models gain nothing from more, and lose much when several test runs share a machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
