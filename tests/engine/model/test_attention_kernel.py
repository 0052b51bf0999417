"""All of torch's attention kernels give the same answer."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.model.attention import kernel


def test_repeated_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    expected = kernel.attend(query, key, value, mask=mask, causal=False, scale=0.3)
    monkeypatch.setattr(kernel, "_repeats_heads", lambda query, mask: True)
    repeated = kernel.attend(query, key, value, mask=mask, causal=False, scale=0.3)
    torch.testing.assert_close(repeated, expected, rtol=1e-5, atol=1e-6)


def test_a_tiny_sink_changes_nothing_and_a_huge_one_takes_everything() -> None:
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    plain = kernel.attend(query, key, value, mask=None, causal=True, scale=0.3)
    without = kernel.attend(query, key, value, mask=None, causal=True, scale=0.3, sinks=torch.full((4,), -1e4))
    torch.testing.assert_close(without, plain, rtol=1e-5, atol=1e-6)
    drained = kernel.attend(query, key, value, mask=None, causal=True, scale=0.3, sinks=torch.full((4,), 1e4))
    assert drained.abs().max() == 0
