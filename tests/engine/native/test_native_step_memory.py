"""The arrays of a step stay valid until the step is over."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from tandem.kernels import library
from tests.engine.native.test_native_model import build, native, reference, tokens


class Churning:
    """The library, with other threads' worth of small allocations between any two of its calls."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: list[object] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def churn_and_call(*arguments: Any) -> Any:
            gc.collect()
            # Arrays of one pointer, as a step's are, that lead nowhere.
            self._kept = [(ctypes.c_void_p * 1)(0x10) for _ in range(5_000)]
            return function(*arguments)

        return churn_and_call


def test_a_step_does_not_read_memory_that_python_has_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids = tokens(40)
    expected = reference(model, ids)
    churning = Churning(library.load())
    monkeypatch.setattr(library, "load", lambda: churning)
    forward, sequences = native(model)
    logits = forward(sequences.batch({0: ids}))
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
