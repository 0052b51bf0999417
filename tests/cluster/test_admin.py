"""The actions of `/admin`, and the commands that come through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError, InternalError, InvalidRequest, RequestError, TandemError, Unavailable
from tandem.base.logs import ClusterLogs, LogLine, LogPage, LogPosition, LogsQuery
from tandem.cluster.commands import operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.operate import HttpControl, change_role_of, drain_nodes, with_controller
from tandem.cluster.config import ClusterTimeouts, SloConfig, TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView, CoresView, PoolView, SupervisedNode
from tandem.cluster.orders import (
    ORDERS,
    AdaptersOrder,
    ApplyOrder,
    EvacuateOrder,
    GoBackOrder,
    LogsOrder,
    PauseOrder,
    ResetCacheOrder,
    ResumeOrder,
    ScaleOrder,
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


class FakeCluster(DirectCluster):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: TandemError | None = None

    def _note(self, *what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(what)

    async def view(self) -> ClusterView:
        return VIEW

    async def configuration(self) -> TandemConfig:
        return TandemConfig(timeouts=ClusterTimeouts(start_s=7.0))

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        self._note("scale", wanted)
        return ["decode: from 1 to 2"]

    async def cores(self, wanted: dict[Role, int]) -> CoresView:
        self._note("cores", wanted)
        return CoresView({}, {Role.DECODE: [frozenset({"here 0"})] * 2})

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        self._note("drain", node_id, timeout_s)
        return False

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        self._note("evacuate", address, timeout_s)
        return {"decode-0": True}

    async def change_role(self, node_id: str, role: Role) -> None:
        self._note("role", node_id, role)

    async def pause(self, names: list[str]) -> list[str]:
        self._note("pause", names)
        return names

    async def resume(self, names: list[str]) -> list[str]:
        self._note("resume", names)
        return []

    async def reset_cache(self, names: list[str]) -> list[str]:
        self._note("reset", names)
        return ["decode-0"]

    async def adapters(self, load: Mapping[str, str], unload: Sequence[str]) -> dict[str, str]:
        self._note("adapters", load, unload)
        return dict(load)

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        self._note("apply", config, dry_run)
        return AppliedChange(["slo.ttft_s"], [], [], [], 3)

    async def go_back(self) -> None:
        self._note("back")

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        self._note("logs", query)
        line = LogLine(7, 1.5, "info", "tandem.node.node", "serves")
        return ClusterLogs({"decode-0": LogPage("a1", [line])}, {"decode-1": "it does not run"})


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def acted(cluster: FakeCluster, action: str, body: Any = None) -> Any:
    return json.loads(asyncio.run(act(cluster.ask, action, json.dumps(body).encode() if body is not None else b"")))


def test_every_action_does_what_it_says(cluster: FakeCluster) -> None:
    assert acted(cluster, "view")["pools"][0]["wanted"] == 2
    assert acted(cluster, "timeouts")["start_s"] == 7.0
    assert acted(cluster, "scale", {"pools": {"decode": 2}}) == {"changes": ["decode: from 1 to 2"]}
    assert acted(cluster, "cores", {"pools": {"decode": 2}})["then"] == {"decode": [["here 0"]] * 2}
    assert acted(cluster, "drain", {"node": "decode-0"}) == {"finished": False}
    assert acted(cluster, "evacuate", {"machine": "10.0.0.2", "timeout_s": 9}) == {"finished": {"decode-0": True}}
    assert acted(cluster, "role", {"node": "decode-0", "role": "prefill"}) == {"node": "decode-0", "role": "prefill"}
    assert acted(cluster, "pause", {"names": ["decode"]}) == {"paused": ["decode"]}
    assert acted(cluster, "resume") == {"paused": []}
    assert acted(cluster, "reset_prefix_cache", {}) == {"reset": ["decode-0"]}
    sql = {"load": {"sql": "/sql"}, "unload": ["law"]}
    assert acted(cluster, "adapters", sql) == {"adapters": {"sql": "/sql"}}
    assert acted(cluster, "apply", {"config": {"slo": {"ttft_s": 1}}, "dry_run": True})["revision"] == 3
    assert acted(cluster, "go_back") == {}
    after = {"decode-0": {"process": "a1", "number": 6}}
    told = acted(cluster, "logs", {"names": ["decode"], "after": after, "last": 5})
    assert told["pages"]["decode-0"]["lines"][0]["message"] == "serves"
    assert told["silent"] == {"decode-1": "it does not run"}
    assert cluster.asked == [
        ("scale", {Role.DECODE: 2}),
        ("cores", {Role.DECODE: 2}),
        ("drain", "decode-0", 60.0),
        ("evacuate", "10.0.0.2", 9.0),
        ("role", "decode-0", Role.PREFILL),
        ("pause", ["decode"]),
        ("resume", []),
        ("reset", []),
        ("adapters", {"sql": "/sql"}, ["law"]),
        ("apply", TandemConfig(slo=SloConfig(ttft_s=1)), True),
        ("back",),
        ("logs", LogsOrder(["decode"], {"decode-0": LogPosition("a1", 6)}, 5)),
    ]


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


def test_commands_do_the_same_through_a_router(cluster: FakeCluster) -> None:
    async def work() -> None:
        control = through_http(cluster)
        assert await control.ask(ViewOrder()) == VIEW
        assert await control.ask(ScaleOrder({Role.DECODE: 2})) == ["decode: from 1 to 2"]
        assert await drain_nodes(control, ["10.0.0.2"], 5.0, lambda line: None) == {"decode-0": False}
        assert await control.ask(EvacuateOrder("10.0.0.2", 5.0)) == {"decode-0": True}
        await change_role_of(control, "decode-0", Role.PREFILL, lambda line: None)
        assert await control.ask(PauseOrder(["decode"])) == ["decode"]
        assert await control.ask(ResumeOrder()) == []
        assert await control.ask(ResetCacheOrder()) == ["decode-0"]
        assert await control.ask(AdaptersOrder({"sql": "/sql"})) == {"sql": "/sql"}
        wanted = TandemConfig(debug=True)
        assert (await control.ask(ApplyOrder(wanted))).at_once == ["slo.ttft_s"]
        assert cluster.asked[-1] == ("apply", wanted, False)
        await control.ask(GoBackOrder())
        assert (await control.ask(LogsOrder())).pages["decode-0"].lines[0].number == 7
        cluster.error = ConfigurationError("pools.decode.max is 1")
        with pytest.raises(RequestError, match=r"pools\.decode\.max is 1"):
            await control.ask(ScaleOrder({Role.DECODE: 3}))
        control.close()

    asyncio.run(work())
    did = "scale drain evacuate role pause resume reset adapters apply back logs"
    assert [what[0] for what in cluster.asked] == did.split()


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
