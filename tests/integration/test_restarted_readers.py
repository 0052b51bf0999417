"""A node that is started again with its disk uses what came from other nodes only if these still stand by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.kvtransfer import sources
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.offload import exchange
from tandem.kvtransfer.protocol import endpoint, generations
from tandem.wire.requests import CachePeers
from tests.engine.model import tiny
from tests.integration.one_engine import OneEngine, hand_over

BLOCK = 4
PROMPT = [(i * 7) % 120 + 5 for i in range(60)]
PATIENCE_S = 60.0


def until(reached: Callable[[], bool], *nodes: OneEngine) -> None:
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end
        for node in nodes:
            node.run("-", [], end)


class Reader:
    """Node r with a tier on disk, which takes its KV from node o."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (exchange, generations, endpoint):
            monkeypatch.setattr(module, "ASK_S", 0.05)
        self.folder = folder
        self.model = tiny.save("llama", folder)
        self.owner = self._start("o", [TierConfig(cpu=1 << 20)])
        self.right = self.owner.answer("right", PROMPT, 4)
        self.node = self.start()

    def _start(self, name: str, tiers: list[TierConfig]) -> OneEngine:
        return OneEngine.start(
            self.model,
            name,
            BLOCK,
            TransferConfig(connector="nixl"),
            memory_bytes=1 << 20,
            prefix_caching=True,
            tiers=tiers,
            shares=True,
        )

    def start(self) -> OneEngine:
        disk = TierConfig(disk=str(self.folder / "disk"), size=4 << 20)
        return self._start("r", [TierConfig(cpu=1 << 20), disk])

    def restart(self) -> None:
        until(lambda: self.on_disk > 0 and self.node.engine.scheduler.has_forgotten, self.node)
        self.node.close()
        self.node = self.start()

    def take(self, handed_over: bool) -> None:
        if handed_over:
            assert hand_over(self.owner, self.node, "t", PROMPT, 4) == self.right
            return
        answer: list[int] = []
        self.node.add("t", PROMPT, 4, None, cache_peers=CachePeers(source=self.owner.tier))
        end = time.monotonic() + PATIENCE_S
        while not self.node.run("t", answer, end):
            self.owner.run("-", [], end)
        assert answer == self.right
        assert self.node.stats().tiers[0].fetched_bytes > 0

    def ask(self) -> int:
        """Returns how many tokens of the prompt came from the disk."""
        assert self.node.answer("again", PROMPT, 4) == self.right
        return self.node.stats().tiers[1].loaded_tokens

    @property
    def on_disk(self) -> int:
        return self.node.stats().tiers[1].used_bytes

    @property
    def left_out(self) -> str:
        return self.node.stats().tiers[1].left_out

    def close(self) -> None:
        self.node.close()
        self.owner.close()


@pytest.fixture(params=[False, True], ids=["copied", "handed over"])
def reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    made = Reader(tmp_path, monkeypatch)
    try:
        made.take(request.param)
        yield made
    finally:
        made.close()


def test_what_its_source_confirms_is_used_and_what_it_distrusts_meanwhile_is_not(reader: Reader) -> None:
    reader.restart()
    until(lambda: not reader.left_out, reader.node, reader.owner)
    assert reader.ask() > 0
    reader.restart()
    reader.owner.engine.scheduler.reset_prefix_cache()  # while the reader has not heard of it
    until(lambda: reader.on_disk == 0, reader.node, reader.owner)
    assert reader.ask() == 0


def test_nothing_is_used_of_a_source_that_has_ended(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.owner.close()
    monkeypatch.setattr(sources, "CONFIRM_S", 0.2)
    reader.restart()
    assert "o has not confirmed" in reader.left_out
    assert reader.ask() == 0
    end = time.monotonic() + 0.3
    until(lambda: time.monotonic() > end, reader.node)
    assert reader.node.answer("later", [*PROMPT[:20], 7, 8, 9], 4)
    assert not reader.left_out
