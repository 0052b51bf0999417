from __future__ import annotations

import json
import re

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.router.config import ApiKey, RouterConfig
from tandem.router.server import RouterServer
from tandem.wire.nodes import NodeState, PoolReport, Role
from tandem.wire.requests import NodeCounters
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import FakeNode
from tests.wire.members import endpoint_at


def test_cluster_shows_every_node(start_router: StartRouter) -> None:
    router = start_router()
    node = router.nodes["p0"]
    shown = {"free_blocks": 70, "running": 3, "waiting": 2, "transfers": 1, "held_blocks": 9}
    node.set(status_fields=shown, counters=NodeCounters(steps=5, transfers_finished={"sent": 4}))

    def reported() -> bool:
        member = router.server.services.pool.member("p0")
        return member is not None and member.status is not None and member.status.free_blocks == 70

    router.wait_for(reported, "the status is here")
    body = router.client.get("/cluster").json()
    about = {"running": 0, "queued": 0, "policy": "least_wait"}
    assert {name: body["router"][name] for name in about} == about
    prefill, decode = body["nodes"]
    about = {
        "node_id": "p0",
        "role": "prefill",
        "state": "ready",
        "incarnation": node.info.incarnation,
        "total_blocks": 1000,
    }
    assert {name: prefill[name] for name in (*about, *shown)} == about | shown
    assert str(node.info.epoch) not in str(body)
    assert prefill["counters"]["steps"] == 5
    assert prefill["counters"]["transfers_finished"] == {"sent": 4}
    assert 0 <= prefill["status_age_s"] < 5
    assert (decode["role"], decode["unusable"]) == ("decode", None)


def test_the_command_shows_pools_and_nodes_that_serve_no_more(
    start_router: StartRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router = start_router()
    router.announce(
        PoolReport(Role.PREFILL, 1), PoolReport(Role.DECODE, 3, starting=1, left_out={"d9": "other weights"})
    )
    router.wait_for(lambda: bool(router.server.services.pool.absent()), "the pools are here")
    assert main(["status", "--url", router.url]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "decode: 1 of 3 nodes ready, 1 starting" in shown
    assert "! d9: other weights" in shown
    assert main(["status", "--url", router.url, "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == router.client.get("/cluster").json() | {"nodes": answer["nodes"]}
    assert [(pool["role"], pool["wanted"]) for pool in answer["pools"]] == [("prefill", 1), ("decode", 3)]


def test_it_says_since_when_its_nodes_are_these(start_router: StartRouter) -> None:
    router = start_router()
    pool = router.server.services.pool
    pool.nodes_since -= 100.0
    long_ago = pool.nodes_since
    router.announce()
    assert pool.nodes_since == long_ago, "the same nodes are announced"
    page = router.client.get("/ui/state").json()
    assert page["now"] - page["nodes_since"] == pytest.approx(100.0, abs=20.0)
    router.add("d1", Role.DECODE)
    assert pool.nodes_since > long_ago + 50.0
    router.remove("d1").kill()
    assert router.client.get("/ui/state").json()["nodes_since"] > page["nodes_since"] + 50.0


def test_health_says_why_not(start_router: StartRouter) -> None:
    router = start_router(decode=0)

    def why() -> str:
        answer = router.client.get("/health")
        assert answer.status_code == 503
        return str(answer.json()["reason"])

    assert "no decode node" in why()
    node = router.add("d0", Role.DECODE)
    router.wait_ready("d0")
    assert router.client.get("/health").status_code == 200
    node.set(state=NodeState.DRAINING)
    router.wait_for(lambda: "d0" not in router.in_view(), "it takes nothing new")
    assert "d0: it is draining" in why()
    node.set(state=NodeState.READY)
    router.wait_ready("d0")
    tasks = router.server.services.tasks

    async def die() -> None:
        raise ValueError("broken")

    router.look(lambda: tasks.keep("doomed", die))
    router.wait_for(lambda: "doomed" in tasks.down, "given up")
    assert tasks.restarts["doomed"] == 5
    assert "doomed" in why()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [({"mute": True}, "silent"), ({"status_fields": {"step_age_s": 1000.0}}, "has not completed a step")],
)
def test_a_node_that_gets_nothing_new(start_router: StartRouter, behaviour: dict[str, object], reason: str) -> None:
    router = start_router(prefill=0, decode=1)
    router.nodes["d0"].set(**behaviour)
    router.wait_for(lambda: not router.in_view(), "out of view")
    (node,) = router.client.get("/cluster").json()["nodes"]
    assert reason in node["unusable"]
    router.nodes["d0"].set(mute=False, state=NodeState.READY, status_fields={})
    router.wait_ready("d0")


def test_a_node_with_another_model_gets_nothing(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=0)
    stranger = FakeNode("d0", Role.DECODE, router.board, model="another")
    router.nodes["d0"] = stranger
    router.announce()
    stranger.wait_until(lambda: stranger.pings > 1, "pinged")
    assert "serves the model 'another'" in error_of(router.complete(), 503)["message"]


def test_a_node_elsewhere_that_cannot_answer_is_said(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router = start_router(prefill=0, decode=1)
    here = router.nodes["d0"].info
    assert "which it cannot reach" not in caplog.text
    there = msgspec.structs.replace(here, node_id="d1", request_endpoint=endpoint_at(5000, "10.0.0.7"))
    router.look(lambda: router.server.set_members([here, there]))
    assert "which it cannot reach" in caplog.text


def test_a_request_id_is_kept_or_made_and_no_path_is_a_label_or_forges_a_line(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router = start_router()
    given = router.client.get("/health", headers={"x-request-id": "mine-1.2:3"})
    assert given.headers["x-request-id"] == "mine-1.2:3"
    for bad in ("with space", "a" * 200, 'q"uote'):
        made = router.client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", made)
    with caplog.at_level("INFO", logger="router.access"):
        for index in range(5):
            router.client.get(f"/random-{index}%0Aforged")
        router.wait_for(lambda: bool(caplog.records), "logged")
    assert "\n" not in caplog.records[0].getMessage()
    assert "random" not in router.client.get("/metrics").text
    assert router.metric("tandem_http_requests_total", route="other", status="404") == 5


def test_tokenize_and_detokenize_are_each_others_inverse(router: RunningRouter) -> None:
    text = "naïve 😀 fox"
    tokens = router.ask("/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048
    assert router.ask("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    chat = router.ask("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    shown = router.ask("/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert shown == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


async def test_a_taken_port_is_said_before_anything_is_loaded(kept_router: RunningRouter) -> None:
    port = httpx.URL(kept_router.url).port
    assert port is not None
    config = RouterConfig(tokenizer_path="/nonexistent", model_name="fake", port=port)
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        await RouterServer(config).start()


def test_web_pages_may_ask_only_where_it_is_allowed(start_router: StartRouter) -> None:
    asked = {"origin": "https://ours", "access-control-request-method": "POST"}
    closed = start_router()
    assert "access-control-allow-origin" not in closed.client.get("/health", headers={"origin": "https://ours"}).headers
    assert closed.client.options("/v1/completions", headers=asked).status_code == 405
    opened = start_router(cors_origins=("https://ours",), api_keys=(ApiKey("a", "k"),))
    preflight = opened.client.options("/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://ours"
    assert opened.client.options("/v1/completions", headers=asked | {"origin": "https://else"}).status_code == 400
