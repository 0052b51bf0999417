"""What a change is expected to bring, from the requests of all routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.router.page_state import PageState
from tandem.router.recent import LATEST, RequestAccount
from tandem.simulator import before_change
from tandem.simulator.before_change import foretell, together
from tandem.simulator.learnt import LearntCosts
from tandem.wire.nodes import Role
from tests.router.test_router_recent import QUICK
from tests.simulator.test_change import rows
from tests.simulator.test_learnt import BOTH, node
from tests.simulator.test_what_if import STARTED_AT, measured, state
from tests.simulator.worlds import a_setup, node_costs

SETUP = a_setup(rows(1))
ACCOUNTS = measured(SETUP)
NOW = {Role.PREFILL: 1, Role.DECODE: 1}
NODES = [node("prefill", BOTH), node("decode", BOTH)]


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes have learnt what they take, and there is time."""
    costs = LearntCosts(dict.fromkeys(Role, node_costs()), "")
    monkeypatch.setattr(before_change, "costs_of_nodes", lambda url, nodes, page: costs)
    monkeypatch.setattr(before_change, "SIMULATING_S", 600.0)


def page(accounts: Sequence[RequestAccount], **fields: Any) -> PageState:
    now = {"now": STARTED_AT + 60.0, **fields}
    return msgspec.structs.replace(state(accounts, "prefill", "decode"), **now)


def told(*pages: PageState, nodes: list[dict[str, Any]] = NODES) -> list[bytes]:
    """What so many routers recall."""
    return [msgspec.json.encode({"page": each, "nodes": nodes}) for each in pages]


def test_the_requests_of_two_routers_are_played_together(learnt: None) -> None:
    two = told(page(ACCOUNTS[::2]), page(ACCOUNTS[1::2]))
    forecast = foretell(two, NOW, {Role.PREFILL: 2}, SETUP.config)
    assert (forecast.now, forecast.then, forecast.requests) == ("1 prefill, 1 decode", "2 prefill, 1 decode", 60)
    assert forecast.sizes == {Role.PREFILL: 2, Role.DECODE: 1, Role.AGGREGATED: 0}
    assert forecast.longest_s == max(account.total_s for account in ACCOUNTS)
    assert foretell(told(page(ACCOUNTS)), NOW, {Role.PREFILL: 2}, SETUP.config).expected == forecast.expected


def test_the_cluster_before_is_the_one_that_the_controller_knows(learnt: None) -> None:
    """A router may show a node that is leaving already."""
    forecast = foretell(told(page(ACCOUNTS)), {**NOW, Role.PREFILL: 2}, {Role.PREFILL: 1}, SETUP.config)
    assert (forecast.now, forecast.then) == ("2 prefill, 1 decode", "1 prefill, 1 decode")


def at(*ended: float) -> list[RequestAccount]:
    return [msgspec.structs.replace(QUICK, ended_at=when) for when in ended]


def test_only_the_time_that_every_router_remembers_counts() -> None:
    full = page(at(*(1000.0 + index for index in range(LATEST))), now=1300.0)
    quiet = page(at(900.0, 1010.0), now=1300.0)
    assert len(together([full, quiet])) == LATEST + 1, (
        "what the quiet one did at 900 s had neighbours that are forgotten"
    )
    assert len(together([page(at(100.0, 2000.0), now=2001.0)])) == 1, "what was half an hour ago tells nothing"


def vllm(config: TandemConfig) -> TandemConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, engine="vllm"))


@pytest.mark.parametrize(
    ("config", "pages", "nodes", "reason"),
    [
        (vllm(SETUP.config), [page(ACCOUNTS)], NODES, "the nodes compute with vllm"),
        (SETUP.config, [page(ACCOUNTS[:5])], NODES, "5 requests are known"),
        (SETUP.config, [page(ACCOUNTS)], [node("prefill", None), node("decode", None)], "no node of the cluster has"),
    ],
)
def test_where_nothing_can_be_said_the_reason_is(
    config: TandemConfig, pages: list[PageState], nodes: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        foretell(told(*pages, nodes=nodes), NOW, {Role.PREFILL: 2}, config)


def test_a_simulation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_change, "SIMULATING_S", -1.0)
    with pytest.raises(ConfigurationError, match="simulating 60 requests twice takes more than"):
        foretell(told(page(ACCOUNTS)), NOW, {Role.PREFILL: 2}, SETUP.config)
