"""What other sizes would do, from the requests that a router remembers; held against simulated clusters whose costs are hidden."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.loadgen.traces import TraceRow
from tandem.simulator.change import change_of
from tandem.simulator.costs import CostModel
from tandem.simulator.simulation import simulate
from tandem.wire.forecasts import Forecast, MeasuredRequest
from tandem.wire.nodes import Role
from tests.simulator.test_what_if import measured, state
from tests.simulator.worlds import a_setup, node_costs


def rows(seed: int, rate: float = 9.0, count: int = 60) -> list[TraceRow]:
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        made.append(TraceRow(at, rng.randrange(200, 1800), rng.randrange(10, 60)))
    return made


def slower(costs: CostModel, prefill: float, decode: float) -> CostModel:
    return msgspec.structs.replace(costs, prefill=costs.prefill.times(prefill), decode=costs.decode.times(decode))


def said(seed: int, wanted: int, *, off: float = 1.0, rate: float = 9.0) -> tuple[Forecast, list[MeasuredRequest]]:
    """Returns what is said of `wanted` prefill nodes with costs that are off by this factor; and what other requests like these take in a
    cluster that has them."""
    hidden = node_costs()
    here = a_setup(rows(seed, rate), costs=hidden)
    change = change_of(
        state(measured(here), "prefill", "decode"),
        {Role.PREFILL: wanted},
        here.config,
        dict.fromkeys(Role, slower(hidden, off, off)),
    )
    there = a_setup(rows(seed + 1000, rate), prefill=wanted, costs=hidden)
    took = [
        MeasuredRequest(one.request_id, -one.ended_at, one.total_s, one.first_token_s, one.token_s)
        for one in measured(there)
    ]
    return change, took


def test_a_node_more_is_said_to_bring_what_it_brings() -> None:
    change, _ = said(1, 2)
    assert (change.now, change.then, change.requests) == ("1 prefill, 1 decode", "2 prefill, 1 decode", 60)
    first = change.expected[1]
    assert first.what == "first token, p90"
    here = measured(a_setup(rows(1)))
    then = measured(a_setup(rows(1), prefill=2))
    assert first.measured == pytest.approx(sorted(one.first_token_s for one in here)[53], rel=0.1)
    assert first.simulated == pytest.approx(first.measured, rel=0.1)
    assert first.then == pytest.approx(sorted(one.first_token_s for one in then)[53], rel=0.2)
    assert first.low < first.then < first.high
    assert first.then < first.measured
    assert change.busy_then["prefill"] < change.busy_now["prefill"]


def test_filling_the_caches_first_does_not_count_as_rest() -> None:
    here = a_setup(rows(1))
    accounts = [msgspec.structs.replace(one, cached_tokens=32) for one in measured(here)]
    change = change_of(state(accounts, "prefill", "decode"), {Role.PREFILL: 2}, here.config, here.costs)
    (busy,) = (load.busy for load in simulate(here).nodes if load.role == "decode")
    assert change.busy_now["decode"] == pytest.approx(busy, rel=0.1)


def test_the_time_of_the_requests_ends_with_the_last_of_them() -> None:
    """One of the first may be answered after all others."""
    here = a_setup(rows(1))
    accounts = measured(here)
    long = msgspec.structs.replace(
        accounts[0], ended_at=accounts[0].ended_at + 100.0, decode_s=accounts[0].decode_s + 100.0
    )
    accounts = [*accounts[1:], long]
    change = change_of(state(accounts, "prefill", "decode"), {Role.PREFILL: 2}, here.config, here.costs)
    assert change.seconds == pytest.approx(long.ended_at - min(one.began_at for one in accounts))


def test_costs_that_are_wrong_make_the_interval_wider() -> None:
    widths = []
    for off in (1.0, 1.2):
        first = said(1, 2, off=off)[0].expected[1]
        widths.append((first.high - first.low) / first.then)
    assert widths[1] > 1.2 * widths[0]


def test_what_began_before_the_nodes_changed_tells_nothing_of_them() -> None:
    setup = a_setup(rows(1))
    page = state(measured(setup), "prefill", "decode")
    began = sorted(account.began_at for account in page.latest)
    since = msgspec.structs.replace(page, nodes_since=began[25])
    assert change_of(since, {Role.PREFILL: 2}, setup.config, setup.costs).requests == 35


@pytest.mark.parametrize(("count", "reason"), [(5, "5 requests are known that began with the nodes that serve now")])
def test_what_cannot_be_said_says_why(count: int, reason: str) -> None:
    setup = a_setup(rows(1)[:count])
    with pytest.raises(ConfigurationError, match=reason):
        change_of(state(measured(setup), "prefill", "decode"), {Role.PREFILL: 2}, setup.config, setup.costs)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router that remembers these requests, and a file of its nodes' costs."""
    monkeypatch.chdir(tmp_path)
    setup = a_setup(rows(1))
    body = msgspec.json.encode(state(measured(setup), "prefill", "decode"))
    monkeypatch.setattr(
        "tandem.simulator.change_command.ApiClient", lambda url, key: _Client(httpx.Response(200, content=body))
    )
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(node_costs()))


class _Client:
    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer

    def read(self, path: str, kind: type) -> object:
        assert path == "/ui/state"
        return msgspec.json.decode(self._answer.content, type=kind)

    def close(self) -> None: ...


COMMAND = ["what-if", "--url", "http://router.test:8000", "--costs", "node.json"]


def test_the_command_says_what_a_change_does(router: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "prefill=2"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "1 prefill, 1 decode → 2 prefill, 1 decode",
        "the last 60 requests",
        "first token, p90",
        "80% between",
    ):
        assert words in " ".join(printed.split())
    both = ["--prefill-costs", "node.json", "--decode-costs", "node.json"]
    assert main([*COMMAND, *both, "prefill=2", "decode=2", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["then"] == "2 prefill, 2 decode"


@pytest.mark.parametrize("size", ["prefill", "prefill=", "prefill=-1", "encode=2"])
def test_a_size_that_cannot_be_meant_is_one_sentence(
    router: None, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert main([*COMMAND, size]) != 0
    assert "must be a role and its nodes, such as prefill=3" in capsys.readouterr().err
