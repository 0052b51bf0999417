"""`tandem serve --address` with a prefill node whose ranks are on three machines of a Ray cluster, and a decode node on a fourth: its
answers, and that the whole node ends when one of its processes or machines does. The tests run one after another."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.cluster_lab import MODEL, Load, RayNodes, Tandem, free_port, parent_of, until_true
from tests.more import more

pytestmark = pytest.mark.own_cluster

# SmolLM2-135M has nine heads of queries and three of keys and values.
SETTINGS = f"""
model: {{path: {MODEL}, dtype: float32}}
pools:
  prefill: {{nodes: 1, tensor_parallel: 3, machines: 3}}
  decode: {{nodes: 1}}
cache: {{memory_bytes: 96MiB}}
scheduler: {{max_model_len: 1024}}
router: {{local_prefill: never}}
"""
RANK = "tandem.node.ranks.process"
KEEPER = "ray::RanksActor"
PROMPT = "The largest planet of the solar system is"


class Machines(RayNodes):
    def __init__(self) -> None:
        super().__init__(decode=1)
        self.raylets = [self.add_machine(prefill=1) for _ in range(3)]

    def ranks(self) -> set[int]:
        return {pid for pid, line in self.processes("").items() if RANK in line}

    def of_node(self) -> set[int]:
        """All processes of the prefill node."""
        return {*self.ranks(), *self.processes(KEEPER), *self.processes("ray::PrefillActor")}


@pytest.fixture(scope="module")
def machines(smollm2_path: Path) -> Iterator[Machines]:
    nodes = Machines()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def tandem(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Tandem:
    folder = tmp_path_factory.mktemp("operator")
    (folder / "tandem.yaml").write_text(SETTINGS)
    tandem = Tandem(machines.address, folder)
    port = str(free_port())
    said = tandem("serve", "--detach", "--config", "tandem.yaml", "--port", port, timeout_s=400)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    return tandem


def answer_of(tandem: Tandem) -> str:
    with httpx.Client(base_url=tandem.url, timeout=120, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def received(tandem: Tandem) -> int:
    return sum(node["counters"]["transfer_bytes_received"] for node in tandem.nodes().values())


def incarnation(tandem: Tandem) -> str:
    found = [node["incarnation"] for node in tandem.nodes().values() if node["role"] == "prefill"]
    return found[0] if found else ""


def test_its_ranks_are_on_three_machines_and_hand_over(tandem: Tandem, machines: Machines) -> None:
    assert "Jupiter" in answer_of(tandem)
    until_true(lambda: received(tandem) > 0, "its status says what the decode node received")
    assert len(machines.ranks()) == 2
    assert len(machines.processes(KEEPER)) == 2
    assert re.search(r"prefill-0.* \S+ \+ \S+ \+ \S+", tandem("status"))


def test_its_logs_are_those_of_all_its_machines(tandem: Tandem) -> None:
    def processes(name: str) -> set[str]:
        return {line["process"] for line in json.loads(tandem("logs", name, "-o", "json"))}

    assert processes("prefill-0") == {"prefill-0", "prefill-0-machine1", "prefill-0-machine2"}
    assert "prefill-0-machine2" in tandem("logs", "prefill-0-machine2")


@pytest.mark.parametrize(
    ("victim", "sign"),
    [
        ("rank", signal.SIGKILL),
        (KEEPER, signal.SIGSTOP),
        *more([("rank", signal.SIGSTOP), (KEEPER, signal.SIGKILL), ("ray::PrefillActor", signal.SIGKILL)]),
    ],
)
def test_what_ends_one_of_its_processes_ends_it_as_one(
    tandem: Tandem, machines: Machines, victim: str, sign: signal.Signals
) -> None:
    first, old, before = answer_of(tandem), machines.of_node(), incarnation(tandem)
    assert len(old) == 5
    with Load(tandem.url, model_of(tandem)):
        pids = machines.ranks() if victim == "rank" else set(machines.processes(victim))
        os.kill(min(pids), sign)
        until_true(lambda: incarnation(tandem) not in ("", before), "the node was replaced")
        assert not machines.of_node() & old, "none of its processes is left when another one serves"
    handed_over = received(tandem)

    def hands_over() -> bool:
        assert answer_of(tandem) == first
        return received(tandem) > handed_over

    until_true(hands_over, "the new node hands over")
    assert len(machines.of_node()) == 5


def model_of(tandem: Tandem) -> str:
    return str(httpx.get(f"{tandem.url}/v1/models", trust_env=False).json()["data"][0]["id"])


def test_a_controller_that_is_killed_finds_it_as_it_is(tandem: Tandem, machines: Machines) -> None:
    before, old = incarnation(tandem), machines.of_node()
    os.kill(machines.pid_of("ray::ControllerActor"), signal.SIGKILL)
    until_true(lambda: "took over 2 nodes" in tandem("status", status=None), "another one has taken over")
    answer_of(tandem)
    assert incarnation(tandem) == before
    assert machines.of_node() == old


def test_a_machine_that_is_lost_takes_it_along_and_another_one_takes_its_place(
    tandem: Tandem, machines: Machines
) -> None:
    first, old, before = answer_of(tandem), machines.of_node(), incarnation(tandem)
    with Load(tandem.url, model_of(tandem)):
        raylet = next(pid for pid in machines.raylets if any(parent_of(it) == pid for it in machines.processes(KEEPER)))
        (keeper,) = [pid for pid in machines.processes(KEEPER) if parent_of(pid) == raylet]
        os.kill(raylet, signal.SIGKILL)
        until_true(lambda: "its processes are heard" in tandem("status"), "it goes on where Ray alone is lost")
        assert incarnation(tandem) == before
        assert machines.of_node() == old
        os.kill(keeper, signal.SIGKILL)
        until_true(lambda: not machines.of_node() & old, "none of its processes is left")
        assert answer_of(tandem) == first
    machines.add_machine(prefill=1)
    before = received(tandem)

    def hands_over() -> bool:
        assert answer_of(tandem) == first
        return received(tandem) > before  # type: ignore[operator]

    until_true(hands_over, "a node on the machines that are there hands over")


def test_nothing_is_left_when_it_is_told_to_end(tandem: Tandem, machines: Machines) -> None:
    tandem("down")
    until_true(lambda: not machines.of_node(), "all its processes have ended")
