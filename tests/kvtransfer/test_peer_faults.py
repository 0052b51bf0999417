"""Peers that die, are started again, or stop answering, at random moments of real transfers between real processes: every request has
one outcome, which is right bytes or a reason; every block comes back, and the next request is served.

Slow: TANDEM_PEER_ROUNDS of every fault (default 1), each with a process of its own.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from kv_connectors import WAYS
from kv_document import installed_example
from kv_fake_engine import first_token_of
from kv_processes import EngineProcess
from kv_pulse import Pulse
from test_connector_contract import Pair

from tandem.kvtransfer.base import Handoff
from tandem.kvtransfer.protocol.endpoint import IDLE_S
from tests.more import more

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("TANDEM_PEER_ROUNDS", "1"))
LEASE_S = 1.0
PATIENCE_S = 30.0  # far beyond every deadline of the protocol, for a busy machine
AT_ONCE = 3
# Descriptors that come and go: of a pair that is being taken down, of a socket that is being probed
SLACK = 8


class Nodes(Pair):
    def __init__(self, connector: str, direction: str) -> None:
        impatient = {"lease_s": LEASE_S, "timeout_s": 5.0, "handshake_timeout_s": 1.0}
        super().__init__(connector, direction, impatient, impatient)
        self.pulse = Pulse()

    @property
    def running(self) -> dict[str, EngineProcess]:
        return {"p": self.producer, "c": self.consumer}

    def restart(self, name: str) -> None:
        setattr(self, {"p": "producer", "c": "consumer"}[name], self.start(name))

    def add_one(self, chance: random.Random) -> tuple[str, list[int]]:
        tokens = [chance.randrange(90) for _ in range(chance.randrange(1, 60))]
        return self.add(tokens, producer={"chunk": 8}), tokens

    def check_end(self, name: str, tokens: list[int]) -> str:
        consumer = self.running["c"]
        end: str = consumer.call("run_until", name, ["loaded", "failed"], PATIENCE_S)
        if end == "loaded":
            assert consumer.call("handoff", name) == Handoff(first_token_of(tokens), len(tokens))
            assert consumer.call("kv_is_right", name)
        else:
            assert consumer.call("failure", name)
        consumer.call("finish", name)
        return end

    def expect_served(self, chance: random.Random) -> None:
        """The next request must succeed. A request during which one of the processes stood still for a large part of a lease does not count,
        and another one is tried."""
        until = time.monotonic() + 4 * PATIENCE_S
        while True:
            lost_s = self._lost_s()
            name, tokens = self.add_one(chance)
            self.running["c"].begin("run_until", name, ["loaded", "failed"], PATIENCE_S)
            self.running["p"].call("run_until", name, ["freed"], PATIENCE_S)
            self.running["c"].result()
            reason = self.running["c"].call("failure", name)
            if self.check_end(name, tokens) == "loaded":
                return
            assert self._lost_s() - lost_s > LEASE_S / 4, f"not served: {reason}"
            assert time.monotonic() < until, f"never served: {reason}"

    def _lost_s(self) -> float:
        return self.pulse.lost_s() + sum(process.call("lost_s") for process in self.running.values())

    def close(self) -> None:
        self.pulse.stop()
        super().close()


@pytest.fixture(scope="module", autouse=True)
def _documents_connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_example(tmp_path_factory.mktemp("document")):
        yield


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(*request.param)
    yield nodes
    nodes.close()


CASES = [(victim, fault) for fault in ("dies", "is restarted", "stops answering") for victim in "pc"]
OTHERS = [way for way in (*WAYS, ("local_connector:create", "push")) if way != WAYS[0]]
# Each fault with the first connector, and two with each other, so that every fault meets one of them at least.
MET = [(WAYS[0], *case) for case in CASES]
MET += [(way, *CASES[(2 * number + at) % len(CASES)]) for number, way in enumerate(OTHERS) for at in (0, 3)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("nodes", "victim", "fault"),
    [*MET, *more(case for case in ((way, *case) for way in OTHERS for case in CASES) if case not in MET)],
    indirect=["nodes"],
    ids=lambda given: "-".join(given) if isinstance(given, tuple) else None,
)
def test_a_survivor_serves_on_when_its_peer(nodes: Nodes, victim: str, fault: str) -> None:
    other = "c" if victim == "p" else "p"
    descriptors: list[int] = []
    began: list[float] = []
    nodes.expect_served(random.Random(0))
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        descriptors.append(nodes.running[other].call("num_descriptors"))
        began.append(time.monotonic())
        requests = dict(nodes.add_one(chance) for _ in range(AT_ONCE))
        for _ in range(chance.randrange(12)):
            nodes.running[chance.choice(["p", "c"])].call("step")
        time.sleep(chance.uniform(0.0, 0.003))
        lost = nodes.running[victim]
        if fault == "stops answering":
            lost.pause()
        else:
            lost.kill()
        if fault == "is restarted":
            nodes.restart(victim)
        survivor = nodes.running[other]
        if victim == "p":
            for name, tokens in requests.items():
                nodes.check_end(name, tokens)
        else:
            for name in requests:
                survivor.call("run_until", name, ["freed"], PATIENCE_S)
        if fault == "stops answering" and victim == "p":
            # A process that is stopped may go on writing: what it could write to waits for it.
            survivor.call("run_until_accounted_for", 63, PATIENCE_S)
        else:
            survivor.call("run_until_free", 63, PATIENCE_S)
        assert survivor.call("stats").in_progress == 0
        if fault == "stops answering":
            # It comes back to requests that are over, and nothing of it lands anywhere.
            lost.resume()
            if victim == "c":
                for name, tokens in requests.items():
                    nodes.check_end(name, tokens)
            for name in requests:
                lost.call("finish", name)
            lost.call("run_until_free", 63, PATIENCE_S)
            survivor.call("run_until_free", 63, PATIENCE_S)
        elif fault == "dies":
            nodes.restart(victim)
        nodes.expect_served(chance)
    # What the survivor held of those that ended is gone, but for a socket to each that it spoke to not long ago. UCX
    # keeps a socket to one that lives on, for each time that it was given up.
    kept = ROUNDS if fault == "stops answering" and nodes.connector == "nixl" else 0
    for now, held in zip(began, descriptors, strict=True):
        spoken_to = sum(now - at < IDLE_S + 1 for at in began if at < now)
        assert held <= descriptors[0] + SLACK + kept + spoken_to, descriptors
