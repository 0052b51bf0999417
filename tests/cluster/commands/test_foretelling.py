"""Before a change of sizes, its command says what it expects; whatever happens to that, the change is made."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.commands import foretelling, operate
from tandem.cluster.commands.foretelling import foretold
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView, PoolView, RouterView, SupervisedNode
from tandem.cluster.orders import ConfigurationOrder, ScaleOrder
from tandem.router.config import ApiKey, RouterConfig
from tandem.wire.forecasts import ExpectedFigure, Forecast
from tandem.wire.nodes import Role
from tests.cluster.direct_cluster import DirectCluster

FORECAST = Forecast(
    "1 prefill, 1 decode", "2 prefill, 1 decode", 60, 90.0,
    [ExpectedFigure("first token, p50", 1.0, 1.0, 0.6, 0.5, 0.7), ExpectedFigure("first token, p90", 1.9, 1.9, 1.1, 0.9, 1.3)],
    {"prefill": 0.9, "decode": 0.4}, {"prefill": 0.5, "decode": 0.42},
)  # fmt: skip
SAID = (
    "expected, by the last 60 requests: first token, p90 1.9 s → 1.1 s (900 ms to 1.3 s); prefill nodes 90% → 50% busy; "
    "decode nodes 40% → 42% busy"
)


class Cluster(DirectCluster):
    def __init__(self, *routers: str) -> None:
        self.did: list[Any] = []
        self.keeps: TandemError | None = None
        self.routers = routers or ("http://router",)

    async def view(self) -> ClusterView:
        nodes = [
            SupervisedNode("prefill-0", Role.PREFILL, "10.0.0.1", "ready", "", 0),
            SupervisedNode("decode-0", Role.DECODE, "10.0.0.1", "ready", "", 0),
        ]
        pools = [PoolView(Role.PREFILL, 1, 1, 0, 0), PoolView(Role.DECODE, 1, 1, 0, 0)]
        return ClusterView("m", pools, nodes, [RouterView("router", url, "ready", "", 0) for url in self.routers], [])

    async def configuration(self) -> TandemConfig:
        return TandemConfig(
            router=RouterConfig("tokenizer", "m", api_keys=(ApiKey(key="secret-key-of-an-operator", name="ops"),))
        )

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        self.did.append(wanted)
        return ["prefill: from 1 to 2"]

    async def change_role(self, node_id: str, role: Role) -> None:
        self.did.append((node_id, role))

    async def keep_forecast(self, forecast: Forecast) -> None:
        if self.keeps is not None:
            raise self.keeps
        self.did.append(forecast)


class Wing:
    def __init__(self, found: Forecast | Exception = FORECAST) -> None:
        self.found = found
        self.asked: list[tuple[Sequence[str], Mapping[Role, int]]] = []

    def foretell(self, urls: Sequence[str], wanted: Mapping[Role, int], config: TandemConfig) -> Forecast:
        self.asked.append((urls, wanted))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wing | None], None]:
    return lambda wing: monkeypatch.setattr(foretelling, "foresight", lambda: wing)


Use = Callable[[Wing | None], None]


def scaled(cluster: Cluster, sizes: dict[Role, int], url: str | None = None) -> tuple[list[str], dict[str, Any]]:
    said: list[str] = []

    async def run() -> dict[str, Any]:
        _, expected = await foretold(
            cluster, lambda view: sizes, lambda: cluster.ask(ScaleOrder(sizes)), said.append, url
        )
        return expected.as_json()

    return said, asyncio.run(run())


def test_the_effect_is_said_then_the_change_is_made_then_the_cluster_is_told(use: Use) -> None:
    cluster, wing = Cluster(), Wing()
    use(wing)
    said, printed = scaled(cluster, {Role.PREFILL: 2})
    assert said == [SAID]
    assert printed == {"forecast": FORECAST}
    assert cluster.did == [{Role.PREFILL: 2}, FORECAST]
    assert wing.asked == [(["http://router"], {Role.PREFILL: 2})]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigurationError("the router remembers 3 requests"), "the router remembers 3 requests"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_where_nothing_can_be_said_the_reason_is_and_the_change_is_made(
    use: Use, error: Exception, sentence: str
) -> None:
    cluster = Cluster()
    use(Wing(error))
    said, printed = scaled(cluster, {Role.PREFILL: 2})
    assert said == [f"what it will bring is not foretold: {sentence}"]
    assert printed == {"forecast": None, "not_foretold": sentence}
    assert cluster.did == [{Role.PREFILL: 2}]


def test_what_takes_too_long_is_given_up(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Cluster):
        async def view(self) -> ClusterView:
            await asyncio.Event().wait()
            raise AssertionError

    cluster = Endless()
    use(Wing())
    monkeypatch.setattr(foretelling, "LIMIT_S", 0.01)
    said, _ = scaled(cluster, {Role.PREFILL: 2})
    assert said == ["what it will bring is not foretold: that took more than 0 s"]
    assert cluster.did == [{Role.PREFILL: 2}]


def test_without_a_simulator_the_change_is_made_and_a_size_that_stays_needs_no_forecast(use: Use) -> None:
    cluster = Cluster()
    use(None)
    assert scaled(cluster, {Role.PREFILL: 2})[1]["not_foretold"] == "this installation has no simulator"
    assert cluster.did == [{Role.PREFILL: 2}]
    use(Wing())
    assert scaled(cluster, {Role.PREFILL: 1}) == ([], {"forecast": None})


def test_a_cluster_that_grades_nothing_is_changed_all_the_same(use: Use) -> None:
    cluster = Cluster()
    cluster.keeps = ConfigurationError("this installation grades no forecasts")
    use(Wing())
    said, _ = scaled(cluster, {Role.PREFILL: 2})
    assert said == [SAID, "the forecast will not be graded: this installation grades no forecasts"]


def test_all_routers_are_asked_and_the_one_that_was_named_by_its_name(use: Use) -> None:
    wing = Wing()
    use(wing)
    scaled(Cluster("http://a", "http://a", "http://b"), {Role.PREFILL: 2}, url="http://outside")
    scaled(Cluster("http://a", "http://a"), {Role.PREFILL: 2}, url="http://outside")
    assert [urls for urls, _ in wing.asked] == [["http://a", "http://b"], ["http://outside"]]


def test_a_node_of_another_role_changes_two_sizes(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, wing, said = Cluster(), Wing(), list[str]()
    use(wing)
    monkeypatch.setattr(operate, "with_controller", lambda which, work, url, say: asyncio.run(work(cluster)))
    target = operate.CommandTarget(which=None, say=said.append)  # type: ignore[arg-type]
    printed = operate.change_role(target, Namespace(node="prefill-0", role="decode"))
    assert wing.asked[0][1] == {Role.PREFILL: 0, Role.DECODE: 2}
    assert said == [SAID, "prefill-0 is ready as a decode node"]
    assert (printed["node"], printed["forecast"]) == ("prefill-0", FORECAST)
    printed = operate.scale(target, Namespace(sizes=["prefill=2"]))
    assert said[2:] == [SAID, "prefill: from 1 to 2"]
    assert msgspec.to_builtins(printed)["forecast"]["then"] == "2 prefill, 1 decode"


async def test_the_configuration_is_told_without_keys() -> None:
    order = ConfigurationOrder()
    told = order.encoded(await Cluster().ask(order))
    assert b"secret" not in told
    assert order.decoded(told).router.api_keys == ()
