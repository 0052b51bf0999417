"""Layer hooks that record their calls."""

from __future__ import annotations


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(("load", layer))

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(("save", layer))
