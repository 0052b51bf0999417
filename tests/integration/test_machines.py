"""A node with ranks on two machines (here two groups of processes): its answers, and that all its processes end together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from tandem.base.errors import ConfigurationError, NodeLost
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig, OtherMachine
from tandem.node.ranks.processes import shares_of
from tandem.node.ranks.supervisor import Ranks
from tandem.wire.nodes import Role
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.integration.far_machines import FarMachine, is_there
from tests.integration.one_engine import OneEngine, expect_read_where_it_decodes, hand_over_all
from tests.more import more
from tests.waiting import until

pytestmark = pytest.mark.own_cluster

PATIENCE_S = 120.0  # far more than any of it takes
SILENCE_S = 2.0


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("machines"))


HERE, THERE = "10.79.0.1", "10.79.0.2"  # the addresses of two machines with networks of their own


def config_of(
    path: Path, width: int, others: int = 1, here: str = "127.0.0.1", there: str = "127.0.0.1", stages: int = 1
) -> NodeConfig:
    """`width`: the number of ranks of all stages together."""
    engine = EngineConfig(
        model=ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1),
        cache=CacheConfig(block_size=4, memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    machines = [OtherMachine(there, device="cpu") for _ in range(others)]
    return NodeConfig(
        "spread",
        Role.AGGREGATED,
        here,
        engine=engine,
        tensor_parallel=width // stages,
        pipeline_parallel=stages,
        others=machines,
    )


class SpreadNode:
    """The part of a node that its ranks need."""

    def __init__(self, config: NodeConfig, enter: Sequence[str] = ()) -> None:
        engine, size = config.engine, config.ranks
        self.lost = threading.Event()
        self.why: list[str] = []
        self.machines = [FarMachine(config, number, enter) for number in range(1, config.machines)]
        self.ranks = Ranks(
            config.node_id,
            size,
            engine,
            shares_of([], 1, size // config.machines),
            LogsConfig(),
            stages=config.pipeline_parallel,
            host=config.host,
            keepers=[machine.endpoint for machine in self.machines],
            silence_s=SILENCE_S,
            lost=self._lost,
        )
        try:
            shard = self.ranks.start()
            runner = load_runner(engine.model, engine.cache, engine.scheduler, shard=shard)
            self.ranks.await_ready()
        except BaseException:
            self.close()
            raise
        self.driver = Driver(runner)
        self.pids = {*self.ranks.pids, *(pid for machine in self.machines for pid in machine.ranks)}

    def _lost(self, why: str) -> None:
        self.why.append(why)
        self.lost.set()

    def close(self) -> None:
        self.ranks.stop()
        for machine in self.machines:
            machine.end()


@contextlib.contextmanager
def spread_node(path: Path, width: int, others: int = 1, stages: int = 1) -> Iterator[SpreadNode]:
    node = SpreadNode(config_of(path, width, others, stages=stages))
    try:
        yield node
    finally:
        node.close()


@pytest.mark.parametrize(
    ("width", "others", "stages"),
    [
        pytest.param(2, 1, 1, id="2"),
        pytest.param(4, 1, 2, id="2 stages of 2"),
        pytest.param(4, 1, 1, id="4", marks=pytest.mark.more),
    ],
)
def test_machines_say_what_one_says_and_end_when_they_are_stopped(
    tiny_llama: Path, width: int, others: int, stages: int
) -> None:
    prompt = [7, 3, 5] * 7
    (answer,) = tiny.reference(tiny_llama, [prompt], 8)
    with spread_node(tiny_llama, width, others, stages) as node:
        node.driver.add("r", prompt)
        assert node.driver.generate(8, max_chunk=5)["r"] == answer.tokens
        assert len(node.pids) == width - 1
        assert all(map(is_there, node.pids))
        node.ranks.stop()
        assert not any(map(is_there, node.pids)), "it returns when none is left, on any machine"
        for machine in node.machines:
            assert machine.process.wait(PATIENCE_S) == 0
    assert not node.why


@pytest.mark.parametrize(
    ("victim", "sign"),
    [
        pytest.param("a rank", signal.SIGKILL, id="a rank, killed"),
        pytest.param("its keeper", signal.SIGSTOP, id="its keeper, stopped"),
        pytest.param("a rank", signal.SIGSTOP, id="a rank, stopped", marks=pytest.mark.more),
        pytest.param("its keeper", signal.SIGKILL, id="its keeper, killed", marks=pytest.mark.more),
    ],
)
def test_what_is_gone_or_hangs_on_another_machine_ends_all(tiny_llama: Path, sign: signal.Signals, victim: str) -> None:
    with spread_node(tiny_llama, 4) as node:
        node.driver.add("r", [7, 3, 5])
        node.driver.generate(2)
        (machine,) = node.machines
        pid = min(machine.ranks) if victim == "a rank" else machine.process.pid
        began = time.monotonic()
        os.kill(pid, sign)
        assert node.lost.wait(PATIENCE_S), "a node at rest hears of it, too"
        # The ranks of a stopped keeper end when rank 0's connections close, or with their keeper, which Ray ends.
        with pytest.raises(NodeLost, match=r"rank 2 has|rank 3 has|machine of ranks 2 to 3"):
            node.driver.generate(10_000)
        node.ranks.stop()
        if (victim, sign) == ("its keeper", signal.SIGSTOP):
            machine.end()
        until(lambda: not any(map(is_there, node.pids)), PATIENCE_S)  # a rank is left over
        assert time.monotonic() - began < PATIENCE_S


def test_ranks_elsewhere_end_with_rank_0(tiny_llama: Path) -> None:
    """The node's process is killed, so no message tells its ranks to end."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tiny_llama)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    assert leader.stdout is not None
    keeper, *pids = (int(text) for text in leader.stdout.readline().split())
    assert len(pids) == 3
    leader.kill()
    leader.wait()
    leader.stdout.close()
    until(lambda: not any(map(is_there, [keeper, *pids])), PATIENCE_S)  # a process is left over


LEADER = """
import sys, time
from pathlib import Path
from tests.integration.test_machines import SpreadNode, config_of
if __name__ == "__main__":
    node = SpreadNode(config_of(Path(sys.argv[1]), 4))
    print(node.machines[0].process.pid, *node.pids, flush=True)
    time.sleep(3600)
"""


def test_what_a_machine_refuses_the_node_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no plan that cuts"):
        SpreadNode(config_of(tiny.save("gpt2", tmp_path), 2))


@pytest.fixture
def other_network() -> Iterator[str]:
    """Makes a network namespace joined to this one by a link; yields the name of this end of the link."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("only root, with the program ip, can make a machine's network")
    mark = f"{os.getpid():x}"
    space, ours, theirs = f"tmach{mark}", f"tmo{mark}", f"tmt{mark}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", space)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        ip("addr", "add", f"{HERE}/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", space, "addr", "add", f"{THERE}/30", "dev", theirs)
        for device in ("lo", theirs):
            ip("-n", space, "link", "set", device, "up")
        yield mark
    finally:
        ip("netns", "del", space)  # and its end of the link, and with it ours


def test_a_machine_that_the_network_loses_ends_its_node_and_ends_its_ranks(
    tiny_llama: Path, other_network: str
) -> None:
    """No connection closes then, so the ranks that wait in a sum would wait for ever on both sides."""
    prompt = [7, 3, 5] * 7
    (answer,) = tiny.reference(tiny_llama, [prompt], 8)
    config = config_of(tiny_llama, 2, here=HERE, there=THERE)
    node = SpreadNode(config, ("ip", "netns", "exec", f"tmach{other_network}"))
    try:
        node.driver.add("r", prompt)
        assert node.driver.generate(8, max_chunk=5)["r"] == answer.tokens
        (machine,) = node.machines
        (pid,) = machine.ranks
        subprocess.run(["ip", "link", "set", f"tmo{other_network}", "down"], check=True)
        began = time.monotonic()
        with pytest.raises(NodeLost, match=r"machine of rank 1 .* has"):
            node.driver.generate(10_000)
        assert time.monotonic() - began < PATIENCE_S
        assert node.lost.wait(PATIENCE_S)
        until(lambda: not is_there(pid), PATIENCE_S)  # its rank ends without being told
        assert machine.process.wait(PATIENCE_S) == 0
    finally:
        node.close()


@pytest.mark.parametrize(("direction", "widths"), [("pull", (2, 1)), ("push", (1, 2)), *more([("push", (2, 1))])])
def test_a_node_on_two_machines_hands_over(
    tiny_llama: Path, direction: Literal["push", "pull"], widths: tuple[int, int]
) -> None:
    prompts = [[(11 * token + which) % 90 + 3 for token in range(61)] for which in range(3)]
    expected = [found.tokens for found in tiny.reference(tiny_llama, prompts, 8)]
    transfer = TransferConfig(connector="nixl", direction=direction, checksums="all")  # type: ignore[arg-type]
    with contextlib.ExitStack() as both:
        engines = [
            both.enter_context(
                OneEngine.start(
                    tiny_llama, name, 4, transfer, memory_bytes=4 << 20, prefix_caching=True, width=width, processes=width > 1, machines=width,
                )
            )
            for name, width in zip("pc", widths, strict=True)
        ]  # fmt: skip
        producer, consumer = engines
        hand_over_all(producer, consumer, prompts, expected)
        (far,) = [machine for engine in engines for machine in engine.far]
        assert len(far.ranks) == 1
    until(lambda: not is_there(far.process.pid), PATIENCE_S)  # it ends with its node


def test_a_prompt_of_a_node_that_loses_a_machine_is_read_where_it_decodes(tiny_llama: Path) -> None:
    """The machine is lost while its KV is being sent."""
    prompt = [(7 * token) % 90 + 3 for token in range(130)]
    (right,) = (found.tokens for found in tiny.reference(tiny_llama, [prompt], 8))
    transfer = TransferConfig(connector="nixl", checksums="all", lease_s=2.0)  # type: ignore[arg-type]
    with (
        OneEngine.start(
            tiny_llama, "p", 4, transfer, scheduler=SchedulerConfig(max_num_batched_tokens=24), memory_bytes=4 << 20, width=2,
            processes=True, machines=2,
        ) as producer,
        OneEngine.start(tiny_llama, "c", 4, transfer, memory_bytes=4 << 20) as consumer,
    ):  # fmt: skip
        expect_read_where_it_decodes(producer, consumer, prompt, right, producer.far[0].end)
