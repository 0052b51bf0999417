"""Pools grow and shrink while they serve, and the answers stay the same."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.config import AutoscalingConfig, PoolConfig, SloConfig
from tandem.wire.nodes import Role
from tests.integration.cluster_lab import Load
from tests.integration.conftest import Deploy, LoopThread, RunningDeployment, float32_config
from tests.integration.reference import NEW_TOKENS, ExpectedAnswer

_replace = msgspec.structs.replace


def ask_all(server: RunningDeployment, expected: list[ExpectedAnswer]) -> None:
    for item in expected:
        choice = server.complete(item.prompt, NEW_TOKENS)["choices"][0]
        assert choice["text"] == item.text


def ready(nodes: list[dict[str, Any]], role: str) -> list[str]:
    return [node["node_id"] for node in nodes if node["role"] == role and node["state"] == "ready"]


def processes_with(mark: dict[str, str]) -> list[str]:
    """Ray's processes that were started with these environment variables."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            if all(f"{name}={value}" in environment for name, value in mark.items()):
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
    return [command for command in found if command.startswith("ray::")]


def test_a_prefill_node_becomes_a_decode_node_and_writes_the_same_answers(
    deploy: Deploy, loop_thread: LoopThread, smollm2_path: Path, expected: list[ExpectedAnswer]
) -> None:
    config = float32_config(smollm2_path, prefill=2, decode=1)
    mark = {"TANDEM_TEST_MARK": secrets.token_hex(8)}
    marked = {pool: _replace(getattr(config.pools, pool), env=mark) for pool in ("prefill", "decode")}
    with deploy(_replace(config, pools=_replace(config.pools, **marked))) as server:
        assert len(processes_with(mark)) == 3, "each node's process has its pool's environment, and no other"
        control = server.deployment.control
        some = expected[:6]
        ask_all(server, some)
        before = {node["node_id"]: node["incarnation"] for node in server.nodes()}
        loop_thread.run(control.change_role("prefill-1", Role.DECODE))
        server.until(lambda nodes: "prefill-1" in ready(nodes, "decode"), "it decodes")
        # Now no other request does.
        assert loop_thread.run(control.drain_node("decode-0", 30.0))
        server.until(lambda nodes: ready(nodes, "decode") == ["prefill-1"], "it alone decodes")
        ask_all(server, some)
        (changed,) = [node for node in server.until_quiet() if node["node_id"] == "prefill-1"]
        assert changed["incarnation"] != before["prefill-1"]
        assert changed["counters"]["transfer_blocks_received"] > 0, "its KV came from the other process"
        assert changed["counters"]["output_tokens"] > 0


def test_a_pool_grows_under_load_and_shrinks_without_it_and_no_request_fails(
    deploy: Deploy, smollm2_path: Path
) -> None:
    config = float32_config(smollm2_path, prefill=1, decode=1)
    config = _replace(
        config,
        pools=_replace(config.pools, decode=PoolConfig(nodes=1, min=1, max=2)),
        slo=SloConfig(inter_token_s=0.001),  # no node can be this fast
        autoscaling=AutoscalingConfig(period_s=0.5, grow_after_s=2.0, shrink_after_s=2.0, settle_s=1.0),
    )
    with deploy(config) as server:
        with Load(server.url, server.model) as load:
            server.until(lambda nodes: len(ready(nodes, "decode")) == 2, "a second decode node")
            done = load.finished
            server.until(lambda _: load.finished > done + 4, "requests on the larger pool")
        server.until(lambda nodes: len(ready(nodes, "decode")) == 1, "one decode node again")
        server.until_quiet()
