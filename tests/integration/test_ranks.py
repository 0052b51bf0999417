"""The processes of a wide node: what they compute, and that they all end together, whichever ends first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError, NodeLost
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.node.ranks.processes import shares_of
from tandem.node.ranks.supervisor import Ranks
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.integration.far_machines import is_there
from tests.more import more
from tests.waiting import until

PATIENCE_S = 120.0  # far more than any of it takes
WIDTH = 2


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("ranks"))


def engine_of(path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1),
        cache=CacheConfig(block_size=4, memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


class WideNode:
    """The part of a node that its ranks need."""

    def __init__(
        self, path: Path, width: int = WIDTH, stages: int = 1, *, apart: bool = False, contexts: int = 1
    ) -> None:
        engine = engine_of(path)
        self.lost = threading.Event()
        self.why: list[str] = []
        self.said: list[str] = []  # the progress reports of the other ranks' loads
        self.ranks = Ranks(
            "wide", width, engine, shares_of([], 1, width), LogsConfig(), stages=stages, contexts=contexts, apart=apart, silence_s=2.0, lost=self._lost,
            report=lambda what, share: self.said.append(what),
        )  # fmt: skip
        shard = self.ranks.start()
        self.runner: TorchRunner = load_runner(engine.model, engine.cache, engine.scheduler, shard=shard)
        self.ranks.await_ready()

    def _lost(self, why: str) -> None:
        self.why.append(why)
        self.lost.set()


@contextlib.contextmanager
def wide_node(
    path: Path, width: int = WIDTH, stages: int = 1, *, apart: bool = False, contexts: int = 1
) -> Iterator[WideNode]:
    node = WideNode(path, width, stages, apart=apart, contexts=contexts)
    try:
        yield node
    finally:
        node.ranks.stop()


@pytest.mark.parametrize(
    ("width", "stages", "apart"), more([(2, 2, False), (2, 1, True), (2, 1, False), (4, 2, False)])
)
def test_processes_say_what_one_says_and_end_when_they_are_stopped(
    tiny_llama: Path, width: int, stages: int, apart: bool
) -> None:
    prompt = [7, 3, 5] * 7
    (answer,) = tiny.reference(tiny_llama, [prompt], 8)
    with wide_node(tiny_llama, width, stages, apart=apart) as node:
        assert any(said.startswith("rank 1: ") for said in node.said), "its load is progress of the node's"
        driver = Driver(node.runner)
        driver.add("r", prompt)
        assert driver.generate(8, max_chunk=5)["r"] == answer.tokens
        pids = node.ranks.pids
        assert all(map(is_there, pids))
    assert not any(map(is_there, pids))
    assert not node.why


@pytest.mark.parametrize(
    ("sign", "parts"),
    [
        pytest.param(signal.SIGKILL, {}, id="killed, a part of each layer"),
        pytest.param(signal.SIGSTOP, {"stages": 2}, id="stopped, some of the layers"),
        pytest.param(signal.SIGKILL, {"stages": 2}, id="killed, some of the layers", marks=pytest.mark.more),
        pytest.param(signal.SIGSTOP, {}, id="stopped, a part of each layer", marks=pytest.mark.more),
        pytest.param(signal.SIGSTOP, {"contexts": 2}, id="stopped, some tokens", marks=pytest.mark.more),
        pytest.param(signal.SIGKILL, {"contexts": 2}, id="killed, some tokens", marks=pytest.mark.more),
    ],
)
def test_a_rank_that_is_gone_or_hangs_ends_all(tiny_llama: Path, sign: signal.Signals, parts: dict[str, int]) -> None:
    with wide_node(tiny_llama, **parts) as node:
        assert any(said.startswith("rank 1: ") for said in node.said), "its load is progress of the node's"
        prompt = [7, 3, 5]
        (answer,) = tiny.reference(tiny_llama, [prompt], 2)
        driver = Driver(node.runner)
        driver.add("r", prompt)
        assert driver.generate(2)["r"] == answer.tokens
        (pid,) = node.ranks.pids
        os.kill(pid, sign)
        if sign is signal.SIGKILL:  # an idle node learns of it, too
            assert node.lost.wait(PATIENCE_S)
        with pytest.raises(NodeLost, match="rank 1 has"):
            driver.generate(10_000)
        assert node.lost.wait(PATIENCE_S)
        assert node.why[0].startswith("rank 1 has")
        assert not is_there(pid)


def test_what_a_rank_refuses_the_node_refuses(tmp_path: Path) -> None:
    path = tiny.save("gpt2", tmp_path)
    engine = engine_of(path)
    ranks = Ranks("wide", WIDTH, engine, shares_of([], 1, WIDTH), LogsConfig(), silence_s=2.0, lost=print)
    try:
        ranks.start()
        with pytest.raises(ConfigurationError, match="no plan that cuts"):
            ranks.await_ready()
    finally:
        ranks.stop()


LEADER = """
import sys, time
from pathlib import Path
from tests.integration.test_ranks import WideNode
if __name__ == "__main__":
    node = WideNode(Path(sys.argv[1]), 3)
    print(*node.ranks.pids, flush=True)
    time.sleep(3600)
"""


def test_no_rank_outlives_its_node(tmp_path: Path) -> None:
    """No rank is left, whether it was running or stopped."""
    path = tiny.save("llama-untied-odd-heads", tmp_path)
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert leader.stdout is not None
    pids = [int(text) for text in leader.stdout.readline().split()]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    until(lambda: not any(map(is_there, pids)), PATIENCE_S)  # a rank is left over
