"""The actions of `/admin`, and the commands that come through it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError, InternalError, InvalidRequest, RequestError, TandemError, Unavailable
from tandem.base.logs import ClusterLogs, LogLine, LogPage, LogPosition
from tandem.cluster.commands import operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.operate import HttpControl, with_controller
from tandem.cluster.config import ClusterTimeouts, SloConfig, TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView, CoresView, PoolView, SupervisedNode
from tandem.cluster.orders import (
    ORDERS,
    AdaptersOrder,
    ApplyOrder,
    ChangeRoleOrder,
    CoresOrder,
    DrainOrder,
    EvacuateOrder,
    GoBackOrder,
    LogsOrder,
    Order,
    PauseOrder,
    ResetCacheOrder,
    ResumeOrder,
    ScaleOrder,
    TimeoutsOrder,
    UnknownAction,
    ViewOrder,
    act,
)
from tandem.wire.nodes import Role
from tests.cluster.direct_cluster import DirectCluster

VIEW = ClusterView(
    "model", [PoolView(Role.DECODE, 2, 1, 0, 0)],
    [SupervisedNode("decode-0", Role.DECODE, "10.0.0.2", "ready", "", 0)], [], [],
)  # fmt: skip


# By the method that an order calls.
ANSWERS: dict[str, Any] = {
    "view": VIEW,
    "configuration": TandemConfig(timeouts=ClusterTimeouts(start_s=7.0)),
    "scale": ["decode: from 1 to 2"],
    "cores": CoresView({}, {Role.DECODE: [frozenset({"here 0"})] * 2}),
    "drain_node": False,
    "evacuate": {"decode-0": True},
    "change_role": None,
    "pause": ["decode"],
    "resume": [],
    "reset_cache": ["decode-0"],
    "adapters": {"sql": "/sql"},
    "apply": AppliedChange(["slo.ttft_s"], [], [], [], 3),
    "go_back": None,
    "logs": ClusterLogs({"decode-0": LogPage("a1", [LogLine(7, 1.5, "info", "tandem.node.node", "serves")])}, {"decode-1": "away"}),
}  # fmt: skip


class FakeCluster(DirectCluster):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: TandemError | None = None

    def __getattr__(self, method: str) -> Any:
        async def called(*given: Any, **named: Any) -> Any:
            if self.error is not None:
                raise self.error
            self.asked.append((method, *given, *named.values()))
            return ANSWERS[method]

        return called


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def acted(cluster: FakeCluster, action: str, body: Any = None) -> Any:
    return json.loads(asyncio.run(act(cluster.ask, action, json.dumps(body).encode() if body is not None else b"")))


LOGS = {"names": ["decode"], "after": {"decode-0": {"process": "a1", "number": 6}}, "last": 5}


@pytest.mark.parametrize(
    ("order", "body", "answer", "asked"),
    [
        (ViewOrder(), None, {"model": "model"}, ("view",)),
        (TimeoutsOrder(), {}, {"start_s": 7.0}, ("configuration",)),
        (ScaleOrder({Role.DECODE: 2}), {"pools": {"decode": 2}}, {"changes": ["decode: from 1 to 2"]}, ("scale", {Role.DECODE: 2})),
        (CoresOrder({Role.DECODE: 2}), {"pools": {"decode": 2}}, {"then": {"decode": [["here 0"]] * 2}}, ("cores", {Role.DECODE: 2})),
        (DrainOrder("decode-0", 60.0), {"node": "decode-0"}, {"finished": False}, ("drain_node", "decode-0", 60.0)),
        (EvacuateOrder("10.0.0.2", 9.0), {"machine": "10.0.0.2", "timeout_s": 9}, {"finished": {"decode-0": True}}, ("evacuate", "10.0.0.2", 9.0)),
        (
            ChangeRoleOrder("decode-0", Role.PREFILL), {"node": "decode-0", "role": "prefill"},
            {"node": "decode-0", "role": "prefill"}, ("change_role", "decode-0", Role.PREFILL),
        ),
        (PauseOrder(["decode"]), {"names": ["decode"]}, {"paused": ["decode"]}, ("pause", ["decode"])),
        (ResumeOrder(), None, {"paused": []}, ("resume", [])),
        (ResetCacheOrder(), {}, {"reset": ["decode-0"]}, ("reset_cache", [])),
        (
            AdaptersOrder({"sql": "/sql"}, ["law"]), {"load": {"sql": "/sql"}, "unload": ["law"]},
            {"adapters": {"sql": "/sql"}}, ("adapters", {"sql": "/sql"}, ["law"]),
        ),
        (
            ApplyOrder(TandemConfig(slo=SloConfig(ttft_s=1)), dry_run=True), {"config": {"slo": {"ttft_s": 1}}, "dry_run": True},
            {"revision": 3, "at_once": ["slo.ttft_s"]}, ("apply", TandemConfig(slo=SloConfig(ttft_s=1)), True),
        ),
        (ApplyOrder(TandemConfig(debug=True)), {"config": {"debug": True}}, {"revision": 3}, ("apply", TandemConfig(debug=True), False)),
        (GoBackOrder(), None, {}, ("go_back",)),
        (
            LogsOrder(["decode"], {"decode-0": LogPosition("a1", 6)}, 5), LOGS,
            {"silent": {"decode-1": "away"}}, ("logs", LogsOrder(["decode"], {"decode-0": LogPosition("a1", 6)}, 5)),
        ),
    ],
    ids=lambda given: given.action if isinstance(given, Order) else "",
)  # fmt: skip
def test_every_action_does_what_it_says_and_what_a_command_orders_through_a_router(
    cluster: FakeCluster, order: Order[Any], body: Any, answer: dict[str, Any], asked: tuple[Any, ...]
) -> None:
    assert answer.items() <= acted(cluster, order.action, body).items()
    control = through_http(cluster)
    assert asyncio.run(control.ask(order)) == asyncio.run(cluster.ask(order))
    control.close()
    assert cluster.asked == [asked] * 3


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("scale", None),
        ("scale", {"pools": {"decoder": 1}}),
        ("scale", {"pools": {"decode": -1}}),
        ("scale", {"pools": {"decode": 1}, "now": True}),
        ("drain", {"node": "decode-0", "timeout_s": -1}),
        ("role", {"node": "decode-0", "role": "router"}),
        ("view", {"x": 1}),
        ("view", []),
        ("logs", {"last": 1_000_000}),
    ],
)
def test_what_cannot_be_meant_is_a_mistake_of_the_request(cluster: FakeCluster, action: str, body: Any) -> None:
    with pytest.raises(InvalidRequest, match=action):
        acted(cluster, action, body)
    assert cluster.asked == []


def test_what_the_cluster_refuses_is_a_mistake_too_and_its_absence_is_not(cluster: FakeCluster) -> None:
    cluster.error = ConfigurationError("pools.decode.max is 1")
    with pytest.raises(InvalidRequest, match=r"pools\.decode\.max is 1"):
        acted(cluster, "scale", {"pools": {"decode": 2}})
    with pytest.raises(RequestError, match=r"pools\.decode\.max is 1"):
        asyncio.run(through_http(cluster).ask(ScaleOrder({Role.DECODE: 2})))
    cluster.error = Unavailable("it is away")
    with pytest.raises(Unavailable):
        acted(cluster, "scale", {"pools": {"decode": 2}})
    with pytest.raises(UnknownAction, match="one of view, timeouts, configuration, scale, foretell, cores, drain"):
        acted(cluster, "down")


def through_http(cluster: FakeCluster) -> HttpControl:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        try:
            done = asyncio.run(act(cluster.ask, request.url.path.removeprefix("/admin/"), request.content))
        except TandemError as error:
            return httpx.Response(error.http_status, json={"error": {"message": str(error)}})
        return httpx.Response(200, content=done)

    return HttpControl("http://router", "key", httpx.MockTransport(answer))


def test_a_server_of_another_kind_is_one_sentence() -> None:
    control = HttpControl("http://server", None, httpx.MockTransport(lambda request: httpx.Response(200, json={})))
    with pytest.raises(InternalError, match="http://server/admin/scale did not answer like a Tandem router"):
        asyncio.run(control.ask(ScaleOrder({Role.DECODE: 2})))


def test_a_command_takes_one_way_to_the_cluster(monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> None:
    monkeypatch.setattr(operate, "HttpControl", lambda url, key: through_http(cluster))
    assert with_controller(WhichCluster(), lambda known: known.ask(ViewOrder()), "http://router") == VIEW
    for both in (WhichCluster("10.0.0.1:6379"), WhichCluster(name="chat")):
        with pytest.raises(ConfigurationError, match="leave one out"):
            with_controller(both, lambda known: known.ask(ViewOrder()), "http://router")


def test_the_page_lists_every_action() -> None:
    from tests.test_documents import PAGES

    page = PAGES["operations.md"].partition("### From anywhere")[2].partition("## Lose a node")[0]
    for action, kind in ORDERS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{action}` |"))
        for field in kind.__struct_fields__:
            assert f'"{field}"' in row
