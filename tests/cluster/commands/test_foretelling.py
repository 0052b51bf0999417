"""Before a change of sizes, its command says what it expects; whatever happens to that, the change is made."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.commands import foretelling, operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.apply import apply
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import AppliedChange, ClusterView, Expectation, PoolView, SupervisedNode, not_foretold
from tandem.cluster.orders import ConfigurationOrder, UnknownAction
from tandem.router.config import ApiKey, RouterConfig
from tandem.wire.nodes import Role
from tests.cluster.direct_cluster import DirectCluster
from tests.cluster.pools.foresight.test_grading import forecast

FORECAST = forecast()
SIMPLY_SAID = Expectation(FORECAST, said="expected, by the last 60 requests: first token, p90 1.9 s → 1.1 s")


class Cluster(DirectCluster):
    def __init__(self, expects: Expectation | TandemError = SIMPLY_SAID) -> None:
        self.did: list[Any] = []
        self.expects = expects

    async def view(self) -> ClusterView:
        nodes = [
            SupervisedNode("prefill-0", Role.PREFILL, "10.0.0.1", "ready", "", 0),
            SupervisedNode("decode-0", Role.DECODE, "10.0.0.1", "ready", "", 0),
        ]
        pools = [PoolView(Role.PREFILL, 1, 1, 0, 0), PoolView(Role.DECODE, 1, 1, 0, 0)]
        return ClusterView("m", pools, nodes, [], [])

    async def configuration(self) -> TandemConfig:
        return TandemConfig(
            router=RouterConfig("tokenizer", "m", api_keys=(ApiKey(key="secret-key-of-an-operator", name="ops"),))
        )

    async def foretell(self, wanted: dict[Role, int]) -> Expectation:
        self.did.append(("foretell", wanted))
        if isinstance(self.expects, TandemError):
            raise self.expects
        return self.expects

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        self.did.append(("scale", wanted))
        return ["prefill: from 1 to 2"]

    async def change_role(self, node_id: str, role: Role) -> None:
        self.did.append(("role", node_id, role))

    async def apply(self, config: TandemConfig, *, dry_run: bool) -> AppliedChange:
        if not dry_run:
            self.did.append("apply")
        return self.changes

    changes = AppliedChange(["prefill: from 1 to 2, 1 node more"], [], [], [], 1, sizes={Role.PREFILL: 2})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def target_of(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Callable[[Cluster], operate.CommandTarget]:
    def target(cluster: Cluster) -> operate.CommandTarget:
        monkeypatch.setattr(operate, "with_controller", lambda which, work, url, say: asyncio.run(work(cluster)))
        return operate.CommandTarget(WhichCluster(), "http://router", said.append)

    return target


Target = Callable[[Cluster], operate.CommandTarget]
SIZES = {Role.PREFILL: 2}


def test_the_effect_is_said_then_the_change_is_made(target_of: Target, said: list[str]) -> None:
    cluster = Cluster()
    printed = operate.scale(target_of(cluster), Namespace(sizes=["prefill=2"]))
    assert said == [SIMPLY_SAID.said, "prefill: from 1 to 2"]
    assert cluster.did == [("foretell", SIZES), ("scale", SIZES)]
    assert printed == {"changes": ["prefill: from 1 to 2"], "forecast": FORECAST}
    assert msgspec.to_builtins(printed)["forecast"]["then"] == "2 prefill, 1 decode"


@pytest.mark.parametrize(
    ("expects", "why"),
    [
        (not_foretold("5 requests are known"), "5 requests are known"),
        (ConfigurationError("this installation foretells nothing"), "this installation foretells nothing"),
        (UnknownAction("there is no action 'foretell'"), "there is no action 'foretell'"),
    ],
)
def test_where_nothing_can_be_said_the_reason_is_and_the_change_is_made(
    target_of: Target, said: list[str], expects: Expectation | TandemError, why: str
) -> None:
    cluster = Cluster(expects)
    printed = operate.scale(target_of(cluster), Namespace(sizes=["prefill=2"]))
    assert said[0] == f"what it will bring is not foretold: {why}"
    assert cluster.did[-1] == ("scale", SIZES)
    assert (printed["forecast"], printed["not_foretold"]) == (None, why)


def test_what_takes_too_long_is_given_up(target_of: Target, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Cluster):
        async def foretell(self, wanted: dict[Role, int]) -> Expectation:
            await asyncio.Event().wait()
            raise AssertionError

    cluster = Endless()
    monkeypatch.setattr(foretelling, "LIMIT_S", 0.01)
    operate.scale(target_of(cluster), Namespace(sizes=["prefill=2"]))
    assert said[0] == "what it will bring is not foretold: that took more than 0 s"
    assert cluster.did == [("scale", SIZES)]


def test_a_size_that_stays_needs_no_forecast(target_of: Target, said: list[str]) -> None:
    cluster = Cluster(Expectation())
    printed = operate.scale(target_of(cluster), Namespace(sizes=["prefill=1"]))
    assert said == ["prefill: from 1 to 2"]
    assert printed["forecast"] is None


def test_a_node_of_another_role_changes_two_sizes(target_of: Target, said: list[str]) -> None:
    cluster = Cluster()
    printed = operate.change_role(target_of(cluster), Namespace(node="prefill-0", role="decode"))
    assert cluster.did == [("foretell", {Role.PREFILL: 0, Role.DECODE: 2}), ("role", "prefill-0", Role.DECODE)]
    assert said == [SIMPLY_SAID.said, "prefill-0 is ready as a decode node"]
    assert (printed["node"], printed["forecast"]) == ("prefill-0", FORECAST)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_sizes_of_a_configuration_are_foretold_before_it_is_applied(
    target_of: Target, said: list[str], dry_run: bool
) -> None:
    cluster = Cluster()
    applied = apply(TandemConfig(), target_of(cluster), dry_run=dry_run)
    assert cluster.did == [("foretell", SIZES), *([] if dry_run else ["apply"])]
    assert said[0] == SIMPLY_SAID.said
    assert applied.expected.forecast == FORECAST


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (AppliedChange(["pools.decode.max"], [], [], [], 1), "limits alone change no size"),
        (
            AppliedChange([], ["cache.block_size"], [], [], 1, sizes={Role.PREFILL: 2}),
            "nodes or routers with other settings come",
        ),
        (AppliedChange(["slo.ttft_s"], [], [], [], 1), ""),
    ],
)
def test_what_no_forecast_knows_of_a_configuration_is_said(
    target_of: Target, said: list[str], changes: AppliedChange, why: str
) -> None:
    cluster = Cluster()
    cluster.changes = changes
    applied = apply(TandemConfig(), target_of(cluster), dry_run=True)
    assert cluster.did == []
    assert applied.expected.not_foretold.startswith(why)
    assert (said[0] == applied.expected.said) is bool(why)


async def test_the_configuration_is_told_without_keys() -> None:
    order = ConfigurationOrder()
    told = order.encoded(await Cluster().ask(order))
    assert b"secret" not in told
    assert order.decoded(told).router.api_keys == ()
