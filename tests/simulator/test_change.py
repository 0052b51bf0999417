"""What other sizes would do, from the requests that a router remembers; held against simulated clusters whose costs are hidden."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, RequestError
from tandem.cluster.cli import main
from tandem.cluster.control import CoresView
from tandem.loadgen.traces import TraceRow
from tandem.router.recent import RequestAccount
from tandem.simulator.change import change_of
from tandem.simulator.costs import CostModel
from tandem.simulator.simulation import simulate
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import Role
from tests.simulator.test_what_if import measured, state
from tests.simulator.worlds import a_setup, node_costs


def rows(seed: int, rate: float = 9.0, count: int = 60) -> list[TraceRow]:
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        made.append(TraceRow(at, rng.randrange(200, 1800), rng.randrange(10, 60)))
    return made


def slower(costs: CostModel, factor: float) -> CostModel:
    return msgspec.structs.replace(costs, prefill=costs.prefill.times(factor), decode=costs.decode.times(factor))


SETUP = a_setup(rows(1))


@functools.cache
def accounts_of(prefill: int = 1) -> list[RequestAccount]:
    return measured(a_setup(rows(1), prefill=prefill))


def change(
    accounts: Sequence[RequestAccount] | None = None, *, off: float = 1.0, since: float | None = None
) -> Forecast:
    """What is said of a prefill node more, by costs that are off by this factor."""
    page = state(accounts_of() if accounts is None else accounts, "prefill", "decode")
    page = msgspec.structs.replace(page, nodes_since=page.nodes_since if since is None else since)
    return change_of(page, {Role.PREFILL: 2}, SETUP.config, dict.fromkeys(Role, slower(node_costs(), off)))


def test_a_node_more_is_said_to_bring_what_it_brings_and_costs_that_are_wrong_make_the_interval_wider() -> None:
    said = change()
    assert (said.now, said.then, said.requests) == ("1 prefill, 1 decode", "2 prefill, 1 decode", 60)
    first = said.expected[1]
    assert first.what == "first token, p90"
    assert first.measured == pytest.approx(sorted(one.first_token_s for one in accounts_of())[53], rel=0.1)
    assert first.simulated == pytest.approx(first.measured, rel=0.1)
    assert first.then == pytest.approx(sorted(one.first_token_s for one in accounts_of(2))[53], rel=0.2)
    assert first.low < first.then < first.high
    assert first.then < first.measured
    assert said.busy_then["prefill"] < said.busy_now["prefill"]
    wrong = change(off=1.2).expected[1]
    assert (wrong.high - wrong.low) / wrong.then > 1.2 * (first.high - first.low) / first.then


def test_a_node_that_gets_no_core_of_its_own_brings_little() -> None:
    """Two nodes that compute at once on one core each take twice as long."""
    page, costs = state(accounts_of(), "prefill", "decode"), dict.fromkeys(Role, node_costs())

    def then(*prefill: str) -> float:
        cores = {Role.PREFILL: [*map(frozenset, prefill)], Role.DECODE: [frozenset("1")]}
        said = change_of(page, {Role.PREFILL: 2}, SETUP.config, costs, cores=({}, cores))
        return said.expected[1].then / said.expected[1].measured

    assert then("0", "2") == then("0") < 0.9 < then("0", "0")


def test_filling_the_caches_first_does_not_count_as_rest() -> None:
    said = change([msgspec.structs.replace(one, cached_tokens=32) for one in accounts_of()])
    (busy,) = (load.busy for load in simulate(SETUP).nodes if load.role == "decode")
    assert said.busy_now["decode"] == pytest.approx(busy, rel=0.1)


def test_the_time_of_the_requests_ends_with_the_last_of_them() -> None:
    """One of the first may be answered after all others."""
    first, *others = accounts_of()
    long = msgspec.structs.replace(first, ended_at=first.ended_at + 100.0, decode_s=first.decode_s + 100.0)
    began = min(one.began_at for one in (long, *others))
    assert change([*others, long]).seconds == pytest.approx(long.ended_at - began)


def test_what_began_before_the_nodes_changed_tells_nothing_of_them() -> None:
    began = sorted(account.began_at for account in accounts_of())
    assert change(since=began[25]).requests == 35
    with pytest.raises(ConfigurationError, match="5 requests are known that began with the nodes that serve now"):
        change(accounts_of()[:5])


def test_a_cluster_that_could_write_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no node would be left to decode"):
        change_of(state(accounts_of(), "prefill", "decode"), {Role.DECODE: 0}, SETUP.config, {})


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router that remembers these requests, and a file of its nodes' costs."""
    monkeypatch.chdir(tmp_path)
    body = msgspec.json.encode(state(accounts_of(), "prefill", "decode"))

    class Client:
        def __init__(self, url: str, key: str | None) -> None: ...

        def read(self, path: str, kind: type) -> object:
            assert path == "/ui/state"
            return msgspec.json.decode(body, type=kind)

        def close(self) -> None: ...

    monkeypatch.setattr("tandem.simulator.change_command.ApiClient", Client)
    monkeypatch.setattr("tandem.simulator.change_command.with_controller", lambda *_: CoresView({}, {}))
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(node_costs()))


COMMAND = ["what-if", "--url", "http://router.test:8000", "--costs", "node.json"]


def test_the_command_says_what_a_change_does(router: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "prefill=2"]) == 0
    printed = capsys.readouterr().out
    change = "1 prefill, 1 decode → 2 prefill, 1 decode"
    for words in (change, "the last 60 requests", "first token, p90", "80% between"):
        assert words in " ".join(printed.split())
    both = ["--prefill-costs", "node.json", "--decode-costs", "node.json"]
    assert main([*COMMAND, *both, "prefill=2", "decode=2", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["then"] == "2 prefill, 2 decode"


def test_the_command_knows_which_nodes_share_cores(
    router: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def then(prefill: Sequence[str]) -> float:
        cores = {Role.PREFILL: [*map(frozenset, prefill)], Role.DECODE: [frozenset("1")]}
        monkeypatch.setattr("tandem.simulator.change_command.with_controller", lambda *_: CoresView({}, cores))
        assert main([*COMMAND, "prefill=2", "-o", "json"]) == 0
        expected: float = json.loads(capsys.readouterr().out)["expected"][1]["then"]
        return expected

    assert then("02") < 0.9 * then("00")


def test_without_a_key_the_command_says_that_it_knows_no_cores(
    router: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> CoresView:
        raise RequestError("/admin needs an operator's key")

    monkeypatch.setattr("tandem.simulator.change_command.with_controller", refused)
    assert main([*COMMAND, "prefill=2"]) == 0
    said = "which cores nodes share is not known, so each is simulated on its own: /admin needs an operator's key"
    assert said in capsys.readouterr().err


def test_costs_of_one_role_need_those_of_the_others(router: None, capsys: pytest.CaptureFixture[str]) -> None:
    without = [word for word in COMMAND if word not in ("--costs", "node.json")]
    assert main([*without, "--decode-costs", "node.json", "prefill=2"]) == 1
    assert "--prefill-costs and --decode-costs need --costs FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("prefill", "write prefill=N, with N from 0"),
        ("prefill=-1", "write prefill=N, with N from 0"),
        ("prefill=99999", "write prefill=N, with N from 0"),
        ("prefill=2 prefill=3", "prefill is given twice"),
        ("router=2", "there is no pool 'router'"),
        ("encode=2", "encode nodes are not simulated: prefill, decode, aggregated are"),
    ],
)
def test_a_size_that_cannot_be_meant_is_one_sentence(
    router: None, capsys: pytest.CaptureFixture[str], sizes: str, words: str
) -> None:
    assert main([*COMMAND, *sizes.split()]) == 1
    assert words in capsys.readouterr().err
