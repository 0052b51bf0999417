"""What a change is expected to bring, from the requests of all routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.config import TandemConfig
from tandem.router.page_state import PageState, PoolRow
from tandem.router.recent import LATEST, RequestAccount
from tandem.simulator import before_change
from tandem.simulator.before_change import foretell, together
from tandem.simulator.learnt import LearntCosts
from tandem.wire.nodes import Role
from tests.router.test_router_recent import QUICK
from tests.simulator.test_change import rows
from tests.simulator.test_what_if import STARTED_AT, measured, state
from tests.simulator.worlds import a_setup, node_costs

SETUP = a_setup(rows(1))
ACCOUNTS = measured(SETUP)
Pages = dict[str, PageState]


def page(accounts: Sequence[RequestAccount], **fields: Any) -> PageState:
    now = {"now": STARTED_AT + 60.0, **fields}
    return msgspec.structs.replace(state(accounts, "prefill", "decode"), **now)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Routers by URL, whose nodes have learnt."""
    found: Pages = {}

    class Client:
        def __init__(self, url: str, key: str | None, timeout: float) -> None:
            self._url = url

        def read(self, path: str, kind: type) -> PageState:
            assert path == "/ui/state"
            if self._url not in found:
                raise Unavailable(f"{self._url} does not answer")
            return found[self._url]

        def close(self) -> None: ...

    costs = LearntCosts(dict.fromkeys(Role, node_costs()), "")
    monkeypatch.setattr(before_change, "SIMULATING_S", 1000.0)  # however busy this machine is
    monkeypatch.setattr(before_change, "ApiClient", Client)
    monkeypatch.setattr(before_change, "learnt_costs", lambda url, timeout: costs)
    return found


def test_the_requests_of_two_routers_are_played_together(pages: Pages) -> None:
    pages["http://a"], pages["http://b"] = page(ACCOUNTS[::2]), page(ACCOUNTS[1::2])
    forecast = foretell(["http://a", "http://b"], {Role.PREFILL: 2}, SETUP.config)
    assert (forecast.now, forecast.then, forecast.requests) == ("1 prefill, 1 decode", "2 prefill, 1 decode", 60)
    assert forecast.sizes == {Role.PREFILL: 2, Role.DECODE: 1, Role.AGGREGATED: 0}
    assert forecast.longest_s == max(account.total_s for account in ACCOUNTS)
    pages["http://c"] = page(ACCOUNTS)
    assert foretell(["http://c"], {Role.PREFILL: 2}, SETUP.config).expected == forecast.expected


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
    ("wanted", "config", "fields", "reason"),
    [
        ({Role.ENCODE: 2}, SETUP.config, {}, "encoder nodes are not simulated"),
        ({Role.PREFILL: 2}, vllm(SETUP.config), {}, "the nodes compute with vllm"),
        ({Role.PREFILL: 2}, SETUP.config, {"latest": ACCOUNTS[:5]}, "5 requests are known"),
        ({Role.PREFILL: 2}, SETUP.config, {"pools": [PoolRow("decode", 2, 1, 1, 0)]}, "1 of 2 decode nodes serve now"),
    ],
)
def test_where_nothing_can_be_said_the_reason_is(
    pages: Pages, wanted: dict[Role, int], config: TandemConfig, fields: dict[str, Any], reason: str
) -> None:
    pages["http://a"] = page(ACCOUNTS, **fields)
    with pytest.raises(ConfigurationError, match=reason):
        foretell(["http://a"], wanted, config)


def test_a_router_that_does_not_answer_leaves_its_requests_unknown(pages: Pages) -> None:
    pages["http://a"] = page(ACCOUNTS)
    with pytest.raises(TandemError, match="http://b does not answer"):
        foretell(["http://a", "http://b"], {Role.PREFILL: 2}, SETUP.config)


def test_a_simulation_that_takes_too_long_is_given_up(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    pages["http://a"] = page(ACCOUNTS)
    monkeypatch.setattr(before_change, "SIMULATING_S", -1.0)
    with pytest.raises(ConfigurationError, match="simulating 60 requests twice takes more than"):
        foretell(["http://a"], {Role.PREFILL: 2}, SETUP.config)
