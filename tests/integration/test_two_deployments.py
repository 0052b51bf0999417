"""Two deployments start on one Ray cluster at the same moment: they share its places, and the end of one does not affect the other.
Then a third one, whose nodes may run only on machines with a label."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_lab import MODEL, START_S, Load, RayNodes, Tandem, free_port, stream

NAMES = ("chat", "code")


@pytest.fixture(scope="module")
def ray_nodes(smollm2_path: Path) -> Iterator[RayNodes]:
    nodes = RayNodes(aggregated=2)
    yield nodes
    nodes.close()


@pytest.fixture
def deployments(ray_nodes: RayNodes, tmp_path: Path) -> Iterator[dict[str, Tandem]]:
    running = {name: Tandem(ray_nodes.address, tmp_path) for name in NAMES}
    ports = {name: free_port() for name in NAMES}
    others = {"chat": f"{{code-model: 'http://127.0.0.1:{ports['code']}'}}", "code": "{}"}
    commands = {
        name: tandem.begin(
            "serve", "--detach", "--name", name, "--model", MODEL, "--port", str(ports[name]),
            "--aggregated", "1", "--kv-memory", "256MiB",
            "--set", f"model.served_name={name}-model", f"router.other_models={others[name]}",
        )
        for name, tandem in running.items()
    }  # fmt: skip
    for name, command in commands.items():
        said, _ = command.communicate(timeout=START_S)
        found = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)
        assert found, said
        running[name].url = found[0]
    yield running
    running["chat"]("down", "--name", "chat", "--now", status=None)
    running["code"]("down", "--name", "code", "--now", status=None)


def said_by(url: str, model: str) -> str:
    lines = stream(url, model, "The sea", 8, lambda count: None)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_one_goes_down_and_the_other_serves_on(
    deployments: dict[str, Tandem], ray_nodes: RayNodes, tmp_path: Path
) -> None:
    chat, code = deployments["chat"], deployments["code"]
    for name, tandem in deployments.items():
        assert stream(tandem.url, f"{name}-model", "Once upon a time", 8, lambda count: None)
        assert list(tandem.nodes()) == ["aggregated-0"], "each has names of its own"
    direct, through = (said_by(one.url, "code-model") for one in (code, chat))
    assert direct == through != "", "one address serves both models"
    standing = json.loads(chat("status", "--all", "-o", "json"))
    assert {one["name"]: one["urls"] for one in standing} == {"chat": [chat.url], "code": [code.url]}
    assert "choose one with --name (chat, code)" in chat("down", status=1)
    assert "these do: chat, code (choose one with --name)" in chat("status", "--name", "other", status=1)
    chat("scale", "--name", "chat", "aggregated=2")
    waiting = "1 node without a machine"
    assert waiting in chat("status", "--name", "chat"), "the other one has the second place"
    with Load(chat.url, "chat-model"):
        before = chat.nodes()["aggregated-0"]["incarnation"]
        assert "everything was finished" in code("down", "--name", "code")
        assert len(ray_nodes.processes("ray::ControllerActor")) == 1
        assert "Tandem does not run" not in chat("status"), "the one that is left need not be named"
        chat.until_roles(aggregated=2)  # the place that has come free
        assert chat.nodes()["aggregated-0"]["incarnation"] == before
    assert "everything was finished" in chat("down")
    assert ray_nodes.processes("ray::ControllerActor") == {}


def test_nodes_run_only_where_the_labels_are_that_their_pool_wants(ray_nodes: RayNodes, tmp_path: Path) -> None:
    ray_nodes.add_machine({"zone": "far"}, aggregated=1)
    tandem = Tandem(ray_nodes.address, tmp_path)
    settings = tmp_path / "zoned.yaml"
    settings.write_text("pools: {aggregated: {nodes: 1, label_selector: {zone: far}}}\n")
    said = tandem(
        "serve", "--detach", "--config", str(settings), "--model", MODEL, "--port", str(free_port()),
        "--kv-memory", "256MiB", timeout_s=START_S,
    )  # fmt: skip
    try:
        (tandem.url,) = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)
        tandem("scale", "aggregated=2")
        assert "1 node without a machine" in tandem("status"), "both other machines' places are free"
        ray_nodes.add_machine({"zone": "far"}, aggregated=1)
        tandem.until_roles(aggregated=2)
    finally:
        tandem("down", "--now", status=None)


SERVED = "SmolLM2-135M-Instruct"
WHERE = """
import logging, ray
ray.init(address="auto", namespace="tandem", logging_level=logging.ERROR, log_to_driver=False)
def where(self):
    return ray.get_runtime_context().get_node_id()
zones = {node["NodeID"]: node["Labels"].get("zone", "") for node in ray.nodes()}
for one in sorted(ray.util.list_named_actors()):
    if one.startswith("aggregated-"):
        print(one, zones[ray.get(ray.get_actor(one).__ray_call__.remote(where))])
"""


def zones_of(tandem: Tandem) -> list[list[str]]:
    return [line.split() for line in tandem.python(WHERE).splitlines()]


def test_a_pool_moves_to_machines_with_other_labels_and_resources_under_load(
    ray_nodes: RayNodes, tmp_path: Path
) -> None:
    ray_nodes.add_machine({"zone": "left"}, aggregated=1)
    ray_nodes.add_machine({"zone": "right"}, aggregated=1, big=1)
    tandem = Tandem(ray_nodes.address, tmp_path)
    settings = tmp_path / "moving.yaml"
    port = free_port()

    def settings_with(**pool: object) -> str:
        config = {
            "model": MODEL,
            "router": {"port": port},
            "cache": {"memory_bytes": "256MiB"},
            "pools": {"aggregated": {"nodes": 1, **pool}},
            "timeouts": {"machines_s": 5},
        }
        settings.write_text(json.dumps(config))
        return str(settings)

    tandem("serve", "--detach", "--config", settings_with(label_selector={"zone": "left"}), timeout_s=START_S)
    try:
        tandem.url = f"http://127.0.0.1:{port}"
        assert zones_of(tandem) == [["aggregated-0", "left"]]
        with Load(tandem.url, SERVED):
            wanted = {"label_selector": {"zone": "right"}, "resources": {"big": 1}}
            said = tandem("apply", settings_with(**wanted), timeout_s=START_S)
            assert "done: 1 node and 1 router serve with this configuration" in said
            assert zones_of(tandem) == [["aggregated-1", "right"]]
            said = tandem("apply", settings_with(label_selector={"zone": "none"}), status=1, timeout_s=START_S)
            assert "taken back: aggregated: no machine has what a node needs with the new configuration" in said
            assert zones_of(tandem) == [["aggregated-1", "right"]], "it was not touched"
    finally:
        tandem("down", "--now", status=None)
