"""`tandem serve --address --detach` on a Ray cluster with separate prefill and decode nodes, which are scaled, drained and killed under
load. The tests run one after another on one cluster. Each leaves one prefill and one decode node, or says what it leaves."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_lab import MODEL, START_S, Load, RayNodes, Tandem, free_port, stream

SETTINGS = ("--model", MODEL, "--port", str(free_port()), "--kv-memory", "256MiB",
            "--set", "router.local_prefill=never")  # fmt: skip


@pytest.fixture(scope="module")
def ray_nodes(smollm2_path: Path) -> Iterator[RayNodes]:
    nodes = RayNodes(prefill=2, decode=2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def tandem(ray_nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Tandem:
    return Tandem(ray_nodes.address, tmp_path_factory.mktemp("operator"))


@pytest.fixture(scope="module")
def model(tandem: Tandem) -> str:
    """Starts the deployment, waits until it serves, and returns its model's name."""
    said = tandem("serve", "--detach", "--prefill", "1", "--decode", "1", *SETTINGS, timeout_s=START_S)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    assert "tandem down" in said
    return re.findall(r"ready after [\d.]+ s: (\S+) on 1 prefill node, 1 decode node", said)[0]


def test_the_command_has_ended_and_the_cluster_answers(tandem: Tandem, model: str) -> None:
    assert stream(tandem.url, model, "Once upon a time", 8, lambda count: None)
    nodes = tandem.nodes()
    assert {node["role"] for node in nodes.values()} == {"prefill", "decode"}
    said = tandem("status")
    assert re.search(r"^prefill: 1 of 1 node ready", said, re.MULTILINE)
    assert re.search(r"^router http://\S+: serving", said, re.MULTILINE)


def test_serving_again_changes_nothing_or_says_what_it_cannot_change(tandem: Tandem, model: str) -> None:
    before = tandem.nodes()
    same = ("serve", "--detach", "--prefill", "1", "--decode", "1", *SETTINGS)
    assert "differs" not in tandem(*same)
    assert "scheduler.max_model_len differs" in tandem(*same, "--max-model-len", "512")
    assert "runs on this Ray cluster already" in tandem("serve", *SETTINGS, status=1)
    after = tandem.nodes()
    assert {name: node["incarnation"] for name, node in after.items()} == {
        name: node["incarnation"] for name, node in before.items()
    }


def test_pools_grow_and_shrink_under_load_without_a_failed_request(tandem: Tandem, model: str) -> None:
    with Load(tandem.url, model) as load:
        said = tandem("scale", "decode=2", "prefill=2")
        assert "what it will bring is not foretold: " in said, "few requests have ended"
        tandem.until_roles(prefill=2, decode=2)
        done = load.finished
        tandem.until(lambda nodes: load.finished > done + 4, "requests finished on the larger pools")
        tandem("scale", "decode=1", "prefill=1")
        tandem.until_roles(prefill=1, decode=1)
        done = load.finished
        tandem.until(lambda nodes: load.finished > done + 2, "requests finished on the smaller pools")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_node_that_is_killed_under_load_is_replaced_and_no_request_fails(
    tandem: Tandem, model: str, ray_nodes: RayNodes, role: str
) -> None:
    title = f"ray::{role.capitalize()}Actor"
    tandem("scale", f"{role}=2")
    before = tandem.until(lambda nodes: [node["role"] for node in nodes.values()].count(role) == 2, f"two {role} nodes")
    epochs = {node["incarnation"] for node in before.values()}
    with Load(tandem.url, model) as load:
        os.kill(min(ray_nodes.processes(title)), signal.SIGKILL)
        tandem.until(
            lambda nodes: len(nodes) == 3 and len({node["incarnation"] for node in nodes.values()} - epochs) == 1,
            "a new one in its place",
        )
        done = load.finished
        tandem.until(lambda nodes: load.finished > done, "requests go on")
    tandem("scale", f"{role}=1")
    tandem.until_roles(prefill=1, decode=1)


def test_a_router_that_is_killed_comes_back_at_its_address_and_nodes_go_on(
    tandem: Tandem, model: str, ray_nodes: RayNodes
) -> None:
    before = {name: node["incarnation"] for name, node in tandem.nodes().items()}
    os.kill(ray_nodes.pid_of("ray::RouterActor"), signal.SIGKILL)
    after = tandem.until(lambda nodes: len(nodes) == 2, "both nodes are known to the new router")
    assert {name: node["incarnation"] for name, node in after.items()} == before
    assert stream(tandem.url, model, "Once upon a time", 8, lambda count: None)


def test_a_role_is_changed_and_changed_back_under_load(tandem: Tandem, model: str, ray_nodes: RayNodes) -> None:
    tandem("scale", "prefill=2")
    nodes = tandem.until_roles(prefill=2, decode=1)
    changing = max(name for name, node in nodes.items() if node["role"] == "prefill")
    pids = set(ray_nodes.processes("ray::PrefillActor"))
    with Load(tandem.url, model):
        assert "is ready as a decode node" in tandem("role", changing, "decode")
        tandem.until_roles(prefill=1, decode=2)
        assert set(ray_nodes.processes("ray::PrefillActor")) == pids, "the same processes, with their weights"
        tandem("role", changing, "prefill")
        tandem.until_roles(prefill=2, decode=1)


def test_a_node_is_drained_and_its_pool_is_smaller_by_one(tandem: Tandem, model: str) -> None:
    """The previous test has left two prefill nodes, and this one leaves the same."""
    going = max(name for name, node in tandem.nodes().items() if node["role"] == "prefill")
    with Load(tandem.url, model):
        assert f"{going}: everything was finished" in tandem("drain", going)
        nodes = tandem.until_roles(prefill=1, decode=1)
        assert going not in nodes
    assert re.search(r"^prefill: 1 of 1 node ready", tandem("status"), re.MULTILINE)


def test_what_no_machine_has_room_for_waits_and_is_said(tandem: Tandem, model: str) -> None:
    tandem("scale", "decode=3")
    tandem.until_roles(prefill=1, decode=2)
    assert "1 node without a machine" in tandem("status")
    tandem("scale", "decode=1")
    tandem.until_roles(prefill=1, decode=1)


def test_down_leaves_no_process(tandem: Tandem, model: str, ray_nodes: RayNodes) -> None:
    assert "everything was finished" in tandem("down")
    for title in ("ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor", "ray::ControllerActor"):
        assert ray_nodes.processes(title) == {}, title
    assert "Tandem does not run on this Ray cluster" in tandem("status", status=1)


def test_without_detach_everything_ends_with_the_command_however_it_ends(
    tandem: Tandem, model: str, ray_nodes: RayNodes
) -> None:
    with tandem.begun("serve", "--decode", "2", *SETTINGS) as command:
        assert command.stdout is not None
        said = []
        for line in command.stdout:
            said.append(line)
            if line.startswith("stop: "):
                break
        assert said[-1].startswith("stop:    Ctrl-C"), "".join(said)
        assert len(ray_nodes.processes("ray::DecodeActor")) == 2
        command.kill()
    deadline = time.monotonic() + 60
    while left := [ray_nodes.processes(f"ray::{kind}Actor") for kind in ("Controller", "Decode", "Prefill", "Router")]:
        if not any(left):
            break
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def test_what_a_killed_command_leaves_in_ray_is_not_what_the_next_one_serves(tandem: Tandem, model: str) -> None:
    said = tandem("serve", "--detach", *SETTINGS, timeout_s=START_S)
    assert "on 1 prefill node, 1 decode node" in said
    assert "took over" not in tandem("status")
    tandem("down")
