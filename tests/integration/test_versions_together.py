"""Processes of two versions in one cluster: this Tandem and a later one, whose messages have more fields. With TANDEM_OTHER the other one
is that commit: `make test-versions OTHER=COMMIT`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.wire.versions import WIRE_VERSION
from tests.integration.cluster_lab import END_S, START_S, Load, RayNodes, Tandem, free_port
from tests.other_tandem import ROOT, make_other_tandem
from tests.waiting import until

PROMPTS = [f"{count} little stories about the sea, one after the other: " * 6 for count in range(8)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return make_other_tandem(tmp_path_factory.mktemp("other"))


@pytest.fixture
def other_tandem(other: tuple[Path, int]) -> Path:
    return other[0]


@pytest.mark.parametrize("of_the_other", ["decode nodes", "all but the decode nodes"])
def test_old_and_new_answer_together(
    serve: Any, of_the_other: str, other: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router, prefill node and decode node: every request crosses the line between the two, on each kind of link."""
    decode_is_other = of_the_other == "decode nodes"
    (decode, decodes_version), (others, others_version) = (
        (other, (ROOT, WIRE_VERSION)) if decode_is_other else ((ROOT, WIRE_VERSION), other)
    )
    monkeypatch.chdir(tmp_path)  # a command's own folder would come before PYTHONPATH
    monkeypatch.setenv("PYTHONPATH", str(others))
    config = {
        "pools": {"prefill": 1, "decode": {"nodes": 1, "env": {"PYTHONPATH": str(decode)}}},
        "router": {"local_prefill": "never"},
    }
    (tmp_path / "tandem.yaml").write_text(json.dumps(config))
    command = serve()
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    command.until(r"^stop: ", 10)

    answers = [streamed(url, prompt) for prompt in PROMPTS]
    assert all(len(text) > 20 for text in answers)

    def nodes_now() -> dict[str, Any]:
        answer = httpx.get(f"{url}/cluster", timeout=10, trust_env=False)
        return {node["node_id"]: node for node in answer.json()["nodes"]}

    until(lambda: nodes_now()["decode-0"]["counters"]["transfer_blocks_received"] > 0)  # KV crossed the line
    nodes = nodes_now()
    versions = {name: node["wire_version"] for name, node in nodes.items()}
    assert versions == {"decode-0": decodes_version, "prefill-0": others_version}
    for node in nodes.values():
        assert node["counters"]["malformed_frames"] == 0
        assert node["counters"]["line_gaps"] == 0
    command.process.terminate()
    assert command.process.wait(END_S) == 0


def streamed(url: str, prompt: str) -> str:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, last = "", ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        assert stream.status_code == 200, stream.read()
        for line in filter(None, stream.iter_lines()):
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                chunk = json.loads(last)
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert last == "[DONE]"
    return text


def test_a_router_of_another_version_takes_the_place_of_this_one_under_load(
    smollm2_path: Path, other: tuple[Path, int], tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "model": "smollm2", "pools": {"aggregated": 1}, "cache": {"memory_bytes": "256MiB"},
        "router": {"port": free_port()},
    }  # fmt: skip
    file = tmp_path / "tandem.yaml"
    file.write_text(json.dumps(config))
    ray_nodes = RayNodes(aggregated=1)
    try:
        tandem = Tandem(ray_nodes.address, tmp_path)
        tandem.url = f"http://127.0.0.1:{config['router']['port']}"
        tandem("serve", "--detach", timeout_s=START_S)
        assert routers_version(tandem.url) == WIRE_VERSION
        config["router"]["env"] = {"PYTHONPATH": str(other[0])}
        file.write_text(json.dumps(config))
        with Load(tandem.url, "SmolLM2-135M-Instruct") as load:
            tandem("apply", "tandem.yaml", timeout_s=START_S)
            assert routers_version(tandem.url) == other[1]
            done = load.finished
            tandem.until(lambda nodes: load.finished > done + 2, "answers through the other router")
        (node,) = tandem.nodes().values()
        assert node["wire_version"] == WIRE_VERSION
        tandem("down")
    finally:
        ray_nodes.close()


def routers_version(url: str) -> int:
    answer = httpx.get(f"{url}/cluster", timeout=10, trust_env=False).json()
    return int(answer["router"]["wire_version"])


WHO = """
import logging, ray
ray.init(address="auto", namespace="tandem", logging_level=logging.ERROR, log_to_driver=False)
def who(self):
    import os, sys
    return os.getpid(), sys.modules["tandem.wire.versions"].__file__
for one in sorted(ray.util.list_named_actors(), key=str):
    print(one, *ray.get(ray.get_actor(one).__ray_call__.remote(who)))
"""


def processes(tandem: Tandem) -> dict[str, tuple[int, Path]]:
    """By name: the process id, and the folder of the process's Tandem."""
    lines = [line.split() for line in tandem.python(WHO).splitlines()]
    return {name: (int(pid), Path(file).parents[2]) for name, pid, file in lines}


class Killing:
    """Kills processes with this title as they appear, each once, until it has killed the given number."""

    def __init__(self, ray_nodes: RayNodes, title: str, times: int) -> None:
        self._ray_nodes, self._title, self._times = ray_nodes, title, times
        self.killed: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self) -> Killing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _kill(self) -> None:
        while len(self.killed) < self._times and not self._over.wait(0.05):
            for process in self._ray_nodes.processes(self._title).keys() - self.killed:
                os.kill(process, signal.SIGKILL)
                self.killed.add(process)


def test_a_controller_of_another_version_takes_the_place_of_this_one_under_load_and_gives_it_back(
    smollm2_path: Path, other_tandem: Path, tmp_path: Path
) -> None:
    """Nodes and routers go on as the processes that they are, also when a version does not serve and the old one comes back."""
    broken = tmp_path / "broken"
    shutil.copytree(other_tandem, broken)
    deployment = broken / "tandem/cluster/pools/deployment.py"
    source = deployment.read_text(encoding="utf-8")
    look = "        clock = Clock()\n"
    assert look in source
    changed = source.replace(look, f'        raise RuntimeError("this version is broken")\n{look}')
    deployment.write_text(changed, encoding="utf-8")

    config: dict[str, Any] = {
        "model": "smollm2", "pools": {"aggregated": 1}, "cache": {"memory_bytes": "256MiB"},
        "router": {"port": free_port()}, "controller": {"start_s": 60},
    }  # fmt: skip
    ray_nodes = RayNodes(aggregated=2)
    try:
        tandem = Tandem(ray_nodes.address, tmp_path)
        tandem.url = f"http://127.0.0.1:{config['router']['port']}"

        def apply(env: dict[str, str], start_s: float, status: int = 0) -> str:
            config["controller"] = {"env": env, "start_s": start_s}
            (tmp_path / "tandem.yaml").write_text(json.dumps(config))
            return tandem("apply", "tandem.yaml", status=status, timeout_s=START_S)

        (tmp_path / "tandem.yaml").write_text(json.dumps(config))
        tandem("serve", "--detach", timeout_s=START_S)
        first = processes(tandem)
        others = {name: there for name, there in first.items() if name != "controller"}
        assert set(others) == {"aggregated-0", "router"}
        with Load(tandem.url, "SmolLM2-135M-Instruct") as load:
            said = apply({"PYTHONPATH": str(other_tandem)}, 60)
            assert "done: the controller is another one" in said
            later = processes(tandem)
            assert later.pop("controller")[1] == other_tandem
            assert later == others

            said = apply({"PYTHONPATH": str(broken)}, 5, status=1)
            assert "this version is broken" in said
            restored = processes(tandem)
            assert restored.pop("controller")[1] == other_tandem
            assert restored == others

            no_tandem = tmp_path / "no"
            (no_tandem / "tandem").mkdir(parents=True)
            (no_tandem / "tandem/__init__.py").write_text("raise ImportError('this is no Tandem')\n")
            said = apply({"PYTHONPATH": str(no_tandem)}, 60, status=1)
            assert "the old one serves: a process with the new environment does not start" in said
            assert processes(tandem)["controller"][1] == other_tandem

            # A rollout begins with it, which the next controller goes on with; and what makes that is killed on the way.
            config["debug"] = True
            with Killing(ray_nodes, "ray::Exchanger", times=2) as killing:
                apply({}, 60)
            assert len(killing.killed) == 2
            back = processes(tandem)
            assert back.pop("controller")[1] == first["controller"][1]
            assert back.pop("router") == others["router"]
            assert len(back) == 1
            assert not back.items() & others.items(), "the node is another one"
            done = load.finished
            tandem.until(lambda nodes: load.finished > done + 2, "answers after all of it")
        tandem("down")
    finally:
        ray_nodes.close()


@pytest.mark.more
def test_a_command_in_the_foreground_stays_while_its_controller_is_replaced_and_still_ends_all(
    smollm2_path: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "model": "smollm2", "pools": {"aggregated": 1}, "cache": {"memory_bytes": "256MiB"},
        "router": {"port": free_port()},
    }  # fmt: skip
    file = tmp_path / "tandem.yaml"
    file.write_text(json.dumps(config))
    ray_nodes = RayNodes(aggregated=1)
    try:
        tandem = Tandem(ray_nodes.address, tmp_path)
        tandem.url = f"http://127.0.0.1:{config['router']['port']}"
        with tandem.begun("serve", "--config", str(file)) as command:
            tandem.until(bool, "it serves")
            before = processes(tandem)
            config["controller"] = {"env": {"TANDEM_TEST_OTHER": "1"}}
            file.write_text(json.dumps(config))
            with Load(tandem.url, "SmolLM2-135M-Instruct"):
                said = tandem("apply", "tandem.yaml", timeout_s=START_S)
                assert "done: the controller is another one" in said
            after = processes(tandem)
            assert before.pop("controller") != after.pop("controller")
            assert before == after, "nodes and routers stay"
            assert command.poll() is None
            command.terminate()
            said, _ = command.communicate(timeout=END_S)
            assert command.returncode == 0, said
            assert "everything was finished" in said
        assert ray_nodes.processes("ray::ControllerActor") == {}
        assert ray_nodes.processes("ray::RouterActor") == {}
    finally:
        ray_nodes.close()
