"""The controller is killed right after each step of a rollout that replaces a node of each pool and the router, under load: the rollout
goes on, and no request fails. TANDEM_ROLLOUT_KILLS says how many rollouts are played."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster_lab import START_S, Load, RayNodes, Tandem, free_port

ROLLOUTS = int(os.environ.get("TANDEM_ROLLOUT_KILLS", "1"))
APPLY_S = 400.0

pytestmark = pytest.mark.timeout(300 + 420 * ROLLOUTS)

# Looks at what the controller has recorded, and kills it once after each record that no earlier one of this rollout was like. Who wrote
# it, and decisions, which the next controller notes when it takes over, are no step of a rollout.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import msgspec, ray
from tandem.cluster.on_ray.neighbours import STATE
from tandem.cluster.on_ray.runtime import namespace_of
from tandem.cluster.on_ray.state_store import internal_kv

mark, draw = sys.argv[1].encode(), random.Random(int(sys.argv[2]))
ray.init(address="auto", namespace="tandem", log_to_driver=False)

def controllers():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::ControllerActor"):
                if mark in (folder / "environ").read_bytes().split(b"\\0"):
                    yield int(folder.name)
        except OSError:
            pass

def step_of(record):
    kept = msgspec.msgpack.decode(record)
    rollout = kept.get("rollout")
    if rollout is None:
        return None
    nodes = [[one.get(what) for what in ("node_id", "revision", "leaving", "left_out")] + [one.get("info") is not None] for one in kept["nodes"]]
    routers = [[one["name"], one.get("leaving"), one.get("info") is not None] for one in kept["routers"]]
    return msgspec.json.encode([rollout.get("going_back"), kept["revision"].get("content"), nodes, routers])

seen, last, killed = set(), None, 0
print("looking", flush=True)
while True:
    record = internal_kv()._internal_kv_get(STATE.encode(), namespace=namespace_of("tandem").encode())
    if record is not None and record != last:
        last = record
        step = step_of(record)
        if step is not None and step not in seen:
            seen.add(step)
            time.sleep(draw.choice([0, 0, 0.005, 0.05, 0.3]))
            for pid in controllers():
                os.kill(pid, signal.SIGKILL)
                killed += 1
            print(killed, step.decode(), flush=True)
    time.sleep(0.002)
"""


class Killer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said: list[str] = []

    def end(self) -> list[str]:
        """The steps after which it killed the controller."""
        self._process.kill()
        said, _ = self._process.communicate()
        return said.splitlines()


@contextlib.contextmanager
def killing(ray_nodes: RayNodes, seed: int) -> Iterator[Killer]:
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLER, ray_nodes.mark, str(seed)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RAY_ADDRESS": ray_nodes.address, "PYTHONPATH": root},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking\n"
        yield Killer(process)
    finally:
        process.kill()
        process.wait()


def test_a_controller_that_is_killed_after_each_step_of_a_rollout_ends_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": "smollm2", "pools": {"prefill": 1, "decode": 1}, "cache": {"memory_bytes": "256MiB"},
        "router": {"port": free_port()},
    }  # fmt: skip
    file = tmp_path / "tandem.yaml"
    file.write_text(json.dumps(config))
    ray_nodes = RayNodes(prefill=2, decode=2)
    try:
        tandem = Tandem(ray_nodes.address, tmp_path)
        tandem.url = f"http://127.0.0.1:{config['router']['port']}"
        tandem("serve", "--config", str(file), "--detach", timeout_s=START_S)
        with Load(tandem.url, "SmolLM2-135M-Instruct") as load:
            for number in range(ROLLOUTS):
                before = set(tandem.nodes())
                config["scheduler"] = {"max_num_seqs": 20 + number}
                config["router"]["limits"] = {"queued": 200 + number}
                file.write_text(json.dumps(config))
                with killing(ray_nodes, number) as killer:
                    said = tandem("apply", str(file), status=None, timeout_s=APPLY_S)
                    steps = killer.end()
                print(f"rollout {number}: {len(steps)} steps, killed after each", *steps, said, sep="\n")
                assert len(steps) > 5, said
                after = tandem.until_roles(prefill=1, decode=1)
                assert not before & set(after), said
                status = json.loads(tandem("status", "-o", "json"))
                assert status["rollout"] is None, status
                assert not load.failures, load.failures
                done = load.finished
                tandem.until(lambda _, done=done: load.finished > done + 2, "answers of the new nodes")
        assert "everything was finished" in tandem("down")
    finally:
        ray_nodes.close()
