"""A new configuration, and a new content of the model, while clients stream."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tandem.cluster.config import RolloutConfig, TandemConfig
from tandem.cluster.models.resolved import with_model
from tandem.cluster.models.store import Model
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tests.integration.cluster_lab import free_port
from tests.integration.conftest import Deploy, LoopThread, RunningDeployment, float32_config
from tests.integration.reference import NEW_TOKENS, ExpectedAnswer

_replace = msgspec.structs.replace


def changed_weights(model: Path, target: Path) -> Path:
    """A copy of the model with other weights in some layers."""
    shutil.copytree(model, target, symlinks=False)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "mlp.down_proj" in name and "layers.1" in name:
                tensors[name] = tensors[name] * -1
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})
    return target


class Asking:
    """Clients that send the same prompts again and again, and keep every answer. `on_new_connections`: each request has its own connection."""

    def __init__(
        self, server: RunningDeployment, prompts: list[list[int]], *, on_new_connections: bool = False
    ) -> None:
        self._server = server
        self._prompts = prompts
        self._on_new_connections = on_new_connections
        self._ending = threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(first,), daemon=True) for first in range(2)]

    def _run(self, turn: int) -> None:
        while not self._ending.is_set():
            turn += 1
            which = turn % len(self._prompts)
            try:
                if self._on_new_connections:
                    with self._server.new_client() as http:
                        answer = self._server.complete(self._prompts[which], NEW_TOKENS, http=http)
                else:
                    answer = self._server.complete(self._prompts[which], NEW_TOKENS)
                self.answers.append((which, answer["choices"][0]["text"]))
            except BaseException as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)


def test_nodes_are_replaced_under_load_and_every_answer_is_of_one_content(
    deploy: Deploy, loop_thread: LoopThread, smollm2_path: Path, expected: list[ExpectedAnswer], tmp_path: Path
) -> None:
    other = changed_weights(smollm2_path, tmp_path / "other")
    config = _replace(float32_config(smollm2_path, prefill=1, decode=1), rollout=RolloutConfig(settle_s=1.0))
    prompts = [item.prompt for item in expected[:4]]
    with deploy(config) as server:
        control = server.deployment.control
        old = [server.complete(prompt, NEW_TOKENS)["choices"][0]["text"] for prompt in prompts]
        assert old == [item.text for item in expected[:4]]
        with Asking(server, prompts) as asking:
            wanted = wish(config, other, server.model)
            change = loop_thread.run(control.apply(wanted, dry_run=False))
            assert set(change.nodes) == {"model.path", "scheduler.max_num_seqs"}
            new_ids = {"prefill-1", "decode-1"}
            server.until(lambda nodes: {node["node_id"] for node in nodes} == new_ids, "all are replaced")
            done = len(asking.answers)
            server.until(lambda _: len(asking.answers) > done + 4, "answers of the new nodes")
        assert asking.failures == []
        new = [server.complete(prompt, NEW_TOKENS)["choices"][0]["text"] for prompt in prompts]
        assert all(before != after for before, after in zip(old, new, strict=True))
        kinds = Counter(
            "old" if answer == old[which] else "new" if answer == new[which] else answer
            for which, answer in asking.answers
        )
        assert set(kinds) == {"old", "new"}, kinds
        view = loop_thread.run(control.view())
        assert (view.rollout, view.revision) == (None, change.revision)
        server.until_quiet()


@pytest.mark.parametrize("setting", ["max_failovers", "port"])
def test_a_router_is_replaced_under_load_and_no_request_fails_at_its_address(
    deploy: Deploy, loop_thread: LoopThread, smollm2_path: Path, setting: str
) -> None:
    """Also while routers move to another port: the old one answers until the new one does."""
    config = _replace(float32_config(smollm2_path, prefill=1, decode=1), rollout=RolloutConfig(settle_s=1.0))
    prompts = [[(7 * token + which) % 40_000 for token in range(1, 40)] for which in range(4)]
    value = free_port() if setting == "port" else 5
    with deploy(config) as server:
        control = server.deployment.control
        expected = [server.complete(prompt, NEW_TOKENS)["choices"][0]["text"] for prompt in prompts]
        with Asking(server, prompts, on_new_connections=True) as asking:
            server.until(lambda _: len(asking.answers) > 2, "the old router answers")
            names = {"model_name": server.model, "tokenizer_path": str(smollm2_path)}
            router = _replace(config.router, **names, **{setting: value})
            change = loop_thread.run(control.apply(_replace(config, router=router), dry_run=False))
            assert (change.nodes, change.routers, change.refused) == ([], [f"router.{setting}"], [])
            assert setting == "port" or change.replaced == ["router"]
            server.until(
                lambda _: [one.name for one in loop_thread.run(control.view()).routers] == ["router~2"],
                "the old router has gone",
            )
            done = len(asking.answers)
            server.until(lambda _: len(asking.answers) > done + 4, "answers of the new router at the old address")
        assert asking.failures == []
        assert set(asking.answers) <= set(enumerate(expected))
        view = loop_thread.run(control.view())
        assert (view.rollout, view.revision) == (None, change.revision)
        url = f"http://127.0.0.1:{value}" if setting == "port" else server.url
        assert [one.url for one in view.routers] == [url] == [server.deployment.url]
        assert {node.node_id for node in view.nodes} == {"prefill-0", "decode-0"}
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            assert server.complete(prompts[0], NEW_TOKENS, http=http)["choices"][0]["text"] == expected[0]
        server.until_quiet()


def test_a_router_and_a_node_that_get_sigterm_finish_what_they_have_and_are_replaced(
    deploy: Deploy, loop_thread: LoopThread, smollm2_path: Path
) -> None:
    from tandem.cluster.on_ray.processes import find_process

    prompts = [[(11 * token + which) % 40_000 for token in range(1, 40)] for which in range(4)]
    with deploy(float32_config(smollm2_path, prefill=0, decode=0, aggregated=2)) as server:
        control = server.deployment

        def get_sigterm(process: NodeSupervisor | RouterSupervisor) -> None:
            os.kill(loop_thread.run(find_process(process.name, server.namespace)).pid, signal.SIGTERM)

        def incarnations() -> dict[str, str]:
            return {node["node_id"]: node["incarnation"] for node in server.nodes()}

        expected = [server.complete(prompt, NEW_TOKENS)["choices"][0]["text"] for prompt in prompts]
        first = incarnations()
        with Asking(server, prompts, on_new_connections=True) as asking:
            server.until(lambda _: len(asking.answers) > 2, "the first nodes answer")
            get_sigterm(control.fleet.nodes["aggregated-0"])
            get_sigterm(control.fleet.routers["router"])
            server.until(
                lambda _: [one.name for one in loop_thread.run(control.view()).routers] == ["router~2"],
                "another router has its place",
            )
            server.until(
                lambda nodes: (
                    incarnations().get("aggregated-0") not in (None, first["aggregated-0"])
                    and all(node["unusable"] is None for node in nodes)
                ),
                "the node is there again",
            )
            done = len(asking.answers)
            server.until(lambda _: len(asking.answers) > done + 4, "answers")
        assert asking.failures == []
        assert set(asking.answers) <= set(enumerate(expected))
        server.until_quiet()


def wish(config: TandemConfig, folder: Path, name: str) -> TandemConfig:
    scheduler = _replace(config.scheduler, max_num_seqs=config.scheduler.max_num_seqs // 2)
    return with_model(
        _replace(config, model=_replace(config.model, served_name=name), scheduler=scheduler), Model(str(folder), name)
    )
