"""docs/api.md says what the code does: every field, policy, deadline and code that it names or must name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_request import CompletionRequest
from tandem.base.errors import Cancelled, ConfigurationError, TandemError
from tandem.base.wings import find_wing, is_there
from tandem.router.config import Heartbeat, PolicyName, Timeouts
from tandem.router.engine_metrics import EngineCollector
from tandem.router.http.app import make_app  # noqa: F401  every error that a route may raise is known by then
from tandem.router.http.request_fields import FIELDS
from tandem.router.metrics import RouterMetrics
from tandem.router.node_metrics import LinkCollector, NodeCollector
from tandem.router.pool import NodePool

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")


DEADLINES = {"queue", "token_idle", "total", "slow_reader", "failover_wait"}


def test_every_field_policy_and_deadline_is_on_the_page() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(Timeouts.__struct_fields__) >= DEADLINES
    assert not [name for name in sorted({*fields, *PolicyName, *DEADLINES}) if f"`{name}`" not in PAGE]


def test_the_fields_that_are_not_obeyed_are_on_the_page_as_they_are_in_the_code() -> None:
    page = iter(PAGE.splitlines())
    assert all(line in page for line in FIELDS.lines()), "each, in this order; between them are those of deleted wings"


# Of wings that may be deleted.
DELETED = set() if is_there("tandem.router.processes") else {"tandem_router_process_up"}


def published() -> set[str]:
    """The names of all metrics in a scrape."""
    registry = RouterMetrics().registry
    pool = NodePool("m", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None)
    registry.register(
        LinkCollector(
            pool,
            SimpleNamespace(malformed=0, handler_errors=0, foreign=0, lines=SimpleNamespace(gaps=0, resent=0)),
            SimpleNamespace(restarts={}),
            SimpleNamespace(count=0, gaps=0),
        )
    )
    for collector in (NodeCollector, EngineCollector):
        registry.register(collector(pool))
    if module := find_wing("tandem.router.processes.figures"):
        registry.register(module.AllFigures([], {}))
    return {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}


def test_the_page_names_the_metrics_that_there_are_and_no_others() -> None:
    of_routers, _, of_nodes = PAGE.partition("## Metrics")[2].partition("`tandem_node_…{node, role}`")
    others = {
        "tandem_",
        "model_name",
        "engine",
        "node",
        "role",
        "state",
        "order",
        "load",
    }  # the prefix, labels and their values
    named = {"tandem_" + name for name in re.findall(r"`(\w+)`", of_routers) if name not in others}
    named |= {"tandem_node_" + name for name in re.findall(r"`(\w+)`", of_nodes)}
    assert named == published() | DELETED


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_metrics_that_other_pages_name_exist(page: Path) -> None:
    named = re.findall(r"`(tandem_\w+[a-z])`", page.read_text(encoding="utf-8"))
    assert set(named) <= published() | DELETED


def codes(error: type[TandemError]) -> set[str]:
    """The codes of this error and of its subclasses, without those that tests made up."""
    rooms = ("tandem.api.", "tandem.base.", "tandem.http_server.", "tandem.router.", "tandem.wire.")
    own = {error.code} if error.__module__.startswith(rooms) else set()
    return own.union(*(codes(kind) for kind in error.__subclasses__()))


def test_every_code_that_a_client_can_see_is_on_the_page() -> None:
    nobody_sees = {ConfigurationError.code, Cancelled.code}
    assert not [code for code in codes(TandemError) - nobody_sees if f"`{code}`" not in PAGE]
