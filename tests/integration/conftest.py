"""Starts Ray once per run, and on it whole deployments with real nodes, NIXL, HTTP and SmolLM2 in float32."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.base.logs import LogsConfig
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.models.resolved import with_model
from tandem.cluster.models.store import prepare_model
from tandem.cluster.on_ray.runtime import start_ray, stop_ray
from tandem.cluster.pools.deployment import Deployment
from tandem.cluster.pools.placement import ThisMachine, this_machine
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.router.config import Heartbeat, LocalPrefill
from tests.cluster.pools.memory_store import MemoryStore
from tests.conftest import ON_ONE_RAY
from tests.integration.cluster_lab import Serve
from tests.integration.reference import ExpectedAnswer, greedy_answers, make_prompts

PATIENCE_S = 60.0
BLOCK_SIZE = 16
# 30 layers, keys and values, 3 heads of 64 values of 4 bytes, 16 tokens.
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK_SIZE

_replace = msgspec.structs.replace


# Each of these files starts clusters, deployments or wide nodes of its own.
OWN_CLUSTERS = {
    "test_alerts.py",
    "test_adapters_at_run_time.py",
    "test_cluster_on_ray.py",
    "test_encoder_nodes.py",
    "test_graded_forecast.py",
    "test_guides_run.py",
    "test_head_away.py",
    "test_crossed_served.py",
    "test_images_served.py",
    "test_killed_controllers.py",
    "test_monitoring.py",
    "test_nccl_connector.py",
    "test_nodes_apart.py",
    "test_offline.py",
    "test_ports.py",
    "test_raylet_ends.py",
    "test_rollout.py",
    "test_router_processes.py",
    "test_scaling.py",
    "test_serve_adapters.py",
    "test_serve_batch.py",
    "test_serve_command.py",
    "test_serve_ranks.py",
    "test_serve_realtime.py",
    "test_serve_tiers.py",
    "test_two_deployments.py",
    "test_verified_rollout.py",
    "test_versions_together.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # The nearest mark counts, and this one would override the test's own mark.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
            if item.path.name in OWN_CLUSTERS:
                item.add_marker(pytest.mark.own_cluster)
                item.add_marker(pytest.mark.integration)
            elif item.path.name in ON_ONE_RAY:
                item.add_marker(pytest.mark.integration)
            else:  # engines and nodes in processes of the test's own, without Ray
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def expected(smollm2_path: Path) -> list[ExpectedAnswer]:
    """transformers' answers, computed before anything else runs, because that needs both cores."""
    from transformers import AutoTokenizer

    prompts = make_prompts(AutoTokenizer.from_pretrained(smollm2_path))
    return greedy_answers(smollm2_path, prompts)


@pytest.fixture(scope="session")
def ray_on_this_machine() -> Iterator[None]:
    start_ray()
    yield
    stop_ray()


class _Quiet:
    """Ignores all events."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: contextlib.nullcontext(lambda *a, **k: None)


class LoopThread:
    """An event loop in its own thread: tests are plain functions, and a deployment needs a running loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any, timeout_s: float = 180.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class RunningDeployment:
    """A serving deployment, with the methods by which tests use it."""

    def __init__(self, deployment: Deployment, thread: LoopThread, namespace: str) -> None:
        self.deployment = deployment
        self.namespace = namespace  # in which Ray keeps its processes' names
        self._thread = thread
        self.url = deployment.url
        self.model = deployment.model_name
        self.http = self.new_client()

    def new_client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def nodes(self, role: str | None = None) -> list[dict[str, Any]]:
        nodes = self.http.get("/cluster").raise_for_status().json()["nodes"]
        return [node for node in nodes if role is None or node["role"] == role]

    def counters(self, role: str) -> dict[str, float]:
        """The numeric counters, summed over the nodes of a role."""
        total: dict[str, float] = {}
        for node in self.nodes(role):
            for name, value in node["counters"].items():
                if isinstance(value, int | float):
                    total[name] = total.get(name, 0) + value
        return total

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> list[dict[str, Any]]:
        """Waits until the nodes in `/cluster` meet `condition`, and returns them; fails with the last answer otherwise."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            nodes = self.nodes()
            if condition(nodes):
                return nodes
            if time.monotonic() > deadline:
                pytest.fail(f"after {PATIENCE_S:.0f} s still not: {what}; the nodes say {nodes}")
            time.sleep(0.1)

    def until_quiet(self) -> list[dict[str, Any]]:
        """Waits until every block is free and nothing runs, waits or is in transfer, by statuses that are newer than this call."""
        asked = time.monotonic()
        return self.until(
            lambda nodes: all(
                time.monotonic() - asked > (node["counters_age_s"] or math.inf)  # it has reported since
                and node["free_blocks"] == node["total_blocks"]
                and not (node["running"] or node["waiting"] or node["transfers"] or node["held_blocks"])
                for node in nodes
            ),
            "every block free and nothing under way",
        )

    def complete(
        self, prompt: list[int], max_tokens: int, *, http: httpx.Client | None = None, **fields: Any
    ) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        response = (http or self.http).post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def float32_config(smollm2_path: Path, prefill: int, decode: int, aggregated: int = 0) -> TandemConfig:
    base = TandemConfig()
    return _replace(
        base,
        model=ModelConfig(path=str(smollm2_path), served_name="smollm2", dtype="float32"),
        cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=1 << 30),
        pools=PoolsConfig(
            prefill=PoolConfig(nodes=prefill), decode=PoolConfig(nodes=decode), aggregated=PoolConfig(nodes=aggregated)
        ),
        # Send every prompt to a prefill node, however short, because these tests are about transfers.
        router=_replace(base.router, port=0, local_prefill=LocalPrefill.NEVER),
        # On a busy machine, too, the KV is waited for instead of computed again.
        transfer=TransferConfig(lease_s=5.0, patience_s=60.0, canary_share=1.0),
        debug=True,
    )


Deploy = Callable[[TandemConfig], contextlib.AbstractContextManager[RunningDeployment]]


@pytest.fixture(scope="session")
def deploy(ray_on_this_machine: None, loop_thread: LoopThread) -> Deploy:
    from tandem.cluster.on_ray.launcher import RayLauncher

    @contextlib.contextmanager
    def running(config: TandemConfig) -> Iterator[RunningDeployment]:
        model = prepare_model(config.model.path, lambda what, share: None)
        namespace = f"test-{secrets.token_hex(4)}"

        async def make() -> Deployment:
            # Each deployment has its own namespace, because deployments of one run may overlap.
            launcher = RayLauncher(config.timeouts.stop_s, namespace=namespace)
            hosts = ThisMachine(this_machine(), "127.0.0.1")
            return Deployment(with_model(config, model), hosts, launcher, MemoryStore(), _Quiet())

        deployment = loop_thread.run(make())
        try:
            loop_thread.run(deployment.start())
            server = RunningDeployment(deployment, loop_thread, namespace)
            # A decode node computes prompts itself until the prefill node's first status has come.
            server.until(
                lambda nodes: len(nodes) == config.pools.total and all(node["unusable"] is None for node in nodes),
                "the router may use every node",
            )
            yield server
        finally:
            loop_thread.run(deployment.stop())

    return running


# As Hermes' template writes calls.
TOOLS_IN_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions: {{ tools | tojson }}. To call one, write "
    '<tool_call>\n{"name": its name, "arguments": an object}\n</tool_call><|im_end|>\n{% endif %}'
)


@pytest.fixture(scope="session")
def taught(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with a chat template for tools, which its own template does not know."""
    folder = tmp_path_factory.mktemp("taught")
    for file in smollm2_path.iterdir():
        (folder / file.name).symlink_to(file)
    template = folder / "chat_template.jinja"
    own = template.read_text()
    template.unlink()
    template.write_text(TOOLS_IN_TEMPLATE + own)
    return folder


@pytest.fixture(scope="session")
def server(deploy: Deploy, taught: Path, expected: list[ExpectedAnswer]) -> Iterator[RunningDeployment]:
    """One prefill node and one decode node, for all tests that leave them as they are. `expected` is asked for first: it wants both cores."""
    config = float32_config(taught, prefill=1, decode=1)
    # Patient: without its prefill node, silent on a busy machine, the decode node would compute prompts itself.
    router = _replace(config.router, prompt_embeds=True, heartbeat=Heartbeat(silence=20.0, starved=20.0))
    model = _replace(config.model, pooling="mean")
    with deploy(_replace(config, model=model, router=router, logs=LogsConfig(level="debug"))) as running:
        yield running
        running.until_quiet()


@pytest.fixture
def serve(smollm2_path: Path) -> Iterator[Any]:
    started: list[Serve] = []

    def start(*flags: str) -> Serve:
        started.append(Serve(*flags))
        return started[-1]

    yield start
    for one in started:
        one.kill_all()
