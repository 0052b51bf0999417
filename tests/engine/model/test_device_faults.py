"""Two whole engines on a device that computes late, a prefill and a decode node, with NIXL between them and every fault of a
transfer: they plan ahead, replay recorded steps, abort and hand over. Answers are those of an engine on the CPU, and every
block comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.core import Engine
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.protocol.endpoint import ProtocolLoop
from tandem.kvtransfer.registry import find_connector
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.fake_device import FakeDevice
from tests.engine.model.test_device_order import BLOCK, Truth, engine_on, greedy
from tests.kvtransfer.kv_faults import FAULTS, Faults, inject
from tests.more import more

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0  # the machine may be busy


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def truth(path: Path) -> Truth:
    return Truth(path)


class Node:
    def __init__(self, engine: Engine, mover: Any, address: PeerAddress) -> None:
        self.engine, self.mover, self.address = engine, mover, address
        self.told: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def step(self) -> None:
        for update in self.engine.step().updates:
            assert update.error is None, update
            self.told.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish is not None:
                self.ended.add(update.request_id)
        self.engine.scheduler.check_integrity()

    @property
    def is_whole(self) -> bool:
        stats = self.engine.scheduler.stats()
        return stats.free_blocks == stats.total_blocks and not self.engine.scheduler.has_work()


class World:
    def __init__(
        self, path: Path, connector: str, device: FakeDevice, *, graphs: bool, kept: torch.dtype = torch.float32
    ) -> None:
        factory = find_connector(f"tests.kvtransfer.kv_faults:{connector}")
        config = TransferConfig(lease_s=1.0, timeout_s=3.0, handshake_timeout_s=1.0)
        self.nodes = []
        for epoch, name in ((1, "p"), (2, "d")):
            context = ConnectorContext(name, epoch, "127.0.0.1", BLOCK, config, lambda: None)
            planner, mover = factory(context)
            engine = engine_on(path, device, (planner, mover), graphs=graphs, kept=kept)
            self.nodes.append(Node(engine, mover, PeerAddress(name, epoch, mover.peer_endpoint)))
        self.prefill, self.decode = self.nodes

    def inject(self, faults: dict[str, float], seed: int) -> None:
        for number, node in enumerate(self.nodes):
            inject(node.mover, Faults(seed=seed * 2 + number, **faults))

    def run(self, seed: int, truth: Truth, requests: int, *, aborts: float, tie: float = 0.0) -> int:
        """How many answers came from KV that was handed over. `tie`: tokens whose logprobs are so close are equally right."""
        chance = random.Random(seed)
        prompts: dict[str, list[int]] = {}
        aborted: set[str] = set()
        until = time.monotonic() + PATIENCE_S
        while len(self.decode.ended | aborted) < requests or len(prompts) < requests:
            assert time.monotonic() < until, "a request hangs"
            if len(prompts) < requests and chance.random() < 0.3:
                name = f"r{seed}-{len(prompts)}"
                prompts[name] = [3 + (chance.randrange(120)) for _ in range(chance.randint(1, 40))]
                for node, peer, role, count in (
                    (self.decode, self.prefill, TransferRole.CONSUME, 6),
                    (self.prefill, self.decode, TransferRole.PRODUCE, 1),
                ):
                    transfer = KVTransferParams(f"t-{name}", role, peer.address)
                    node.engine.add_request(made_request(name, prompts[name], greedy(count), transfer=transfer))
            if prompts and chance.random() < aborts:
                name = chance.choice(sorted(prompts))
                if name not in self.decode.ended:
                    aborted.add(name)
                    for node in self.nodes:
                        node.engine.abort_requests([name])
            chance.choice(self.nodes).step()
            time.sleep(0.0005)
        for name, prompt in prompts.items():
            right = truth.of(prompt)[0]
            first, rest = self.prefill.told.get(name, []), self.decode.told.get(name, [])
            # A node that began from a token of the other one reports it, too.
            if tie == 0.0:
                assert first == right[: len(first)], name
                assert rest == right[: len(rest)], name
            else:
                assert truth.allows(prompt, first, tie), name
                assert truth.allows(prompt, rest, tie), name
            assert name in aborted or len(rest) == 6, name
        return self.decode.mover.stats().outcomes.get("received", 0)

    def settle(self) -> None:
        self.inject({}, 0)
        for node in self.nodes:
            node.mover.faulty_send.join()
        until = time.monotonic() + PATIENCE_S
        while not all(node.is_whole for node in self.nodes):
            assert time.monotonic() < until, "blocks are missing"
            for node in self.nodes:
                node.step()
            time.sleep(0.001)

    def close(self) -> None:
        for node in self.nodes:
            node.engine.shutdown()


@pytest.fixture
def transfers_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The thread of a connector works with the device's tensors, too."""
    device = FakeDevice(seed=1, pace=0.02)
    turn = ProtocolLoop.turn

    def within(loop: ProtocolLoop, endpoint: Any, wait_s: float) -> float | None:
        with device.in_thread(), torch.inference_mode():
            return turn(loop, endpoint, wait_s)

    monkeypatch.setattr(ProtocolLoop, "turn", within)
    with device.present(), torch.inference_mode():
        yield device


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("connector", "graphs", "faults"),
    [
        ("device_nixl", True, list(FAULTS)[-1:]),  # everything at once
        *more([("device_nixl", True, list(FAULTS)), ("staged_nixl", False, list(FAULTS))]),
    ],
    ids=["directly, recorded", "directly, recorded, each alone", "staged, eager"],
)
def test_answers_are_right_and_blocks_come_back_whatever_fails(
    path: Path, truth: Truth, transfers_on_device: FakeDevice, connector: str, graphs: bool, faults: list[str]
) -> None:
    world = World(path, connector, transfers_on_device, graphs=graphs)
    try:
        world.inject({}, 0)
        world.run(0, truth, 2, aborts=0.0)
        for seed, fault in enumerate(faults, 1):
            for node in world.nodes:
                node.told.clear()
                node.ended.clear()
            world.inject(FAULTS[fault], seed)
            world.run(seed, truth, 2 if len(faults) > 1 else 4, aborts=0.01)
            world.settle()
    finally:
        world.close()


@pytest.mark.more
@pytest.mark.parametrize("connector", ["staged_nixl", "device_nixl"])
def test_keys_and_values_in_fp8_are_handed_over(path: Path, transfers_on_device: FakeDevice, connector: str) -> None:
    truth = Truth(path, "fp8")
    world = World(path, connector, transfers_on_device, graphs=True, kept=torch.float8_e4m3fn)
    try:
        # A last bit that differs in another batch can become another number of FP8.
        received = world.run(0, truth, 3, aborts=0.0, tie=0.01)
        assert received
        world.settle()
    finally:
        world.close()
