from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.chaos.command import describe, finished_in, own_traffic, run
from tandem.cluster.chaos.conductor import Conductor
from tandem.cluster.chaos.plan import ChaosRules, ProcessKind, dangers, make_plan
from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands import operate
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.on_ray.runtime import import_ray
from tandem.router.metrics import RouterMetrics
from tests.cluster.chaos.views import cluster
from tests.cluster.direct_cluster import DirectCluster


def test_the_dry_run_names_every_blow_and_its_victim_and_what_it_will_not_know() -> None:
    view = cluster(decode=1)
    plan = make_plan(ChaosRules(minutes=1, every_s=10, seed=2), [ProcessKind.DECODE])
    lines = describe(view, plan, dangers(view, [ProcessKind.DECODE], 15.0, 5.0), "probes", 3)
    assert lines[0] == "tiny: 1 controller, 2 prefill, 1 decode, 1 router"
    assert "3 probes at once" in lines[1]
    assert sum("decode-0" in line for line in lines) == len(plan) == 5
    assert lines[-1].startswith("! there is one decode node")
    assert "not known" in describe(cluster(), plan, [], "own", 3)[1]


def test_a_cluster_that_was_not_named_is_never_struck_nor_one_whose_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))  # no server runs here
    monkeypatch.setattr(operate, "joined", lambda which: pytest.fail("the cluster was joined"))
    for words, why in (
        (["--yes"], "--yes needs --address"),
        (["--yes", "--address", "h:1", "--out", str(tmp_path / "file")], "--out"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            run(make_parser().parse_args(["chaos", *words]))


@pytest.mark.parametrize("users", ["0", "-1", "1001"])
def test_a_number_of_users_that_cannot_be_meant_is_refused(users: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--users", users]) == 1
    assert "--users" in capsys.readouterr().err


def test_own_traffic_is_what_the_routers_have_counted_since() -> None:
    metrics = RouterMetrics()
    for _ in range(3):
        metrics.requests_finished.inc("stop")
    before = finished_in(metrics.render().decode())
    assert before == {"stop": 3.0}
    for how in ["length"] * 4 + ["error"] * 2:
        metrics.requests_finished.inc(how)
    traffic = own_traffic(before, finished_in(metrics.render().decode()))
    assert (traffic.requests, traffic.failed) == (6, {"error": 2})
    assert own_traffic({"stop": 9.0}, {"stop": 2.0}).requests == 0, "one began to count again"


class KnownController(DirectCluster):
    async def view(self) -> ClusterView:
        return cluster(decode=2)

    async def configuration(self) -> TandemConfig:
        return TandemConfig()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    import_ray()
    from tandem.cluster.on_ray import remote_controller, runtime

    monkeypatch.setattr(operate, "joined", lambda which: nullcontext())
    monkeypatch.setattr(remote_controller, "chosen", lambda name: name)
    monkeypatch.setattr(remote_controller, "the_controller", lambda name: KnownController())
    monkeypatch.setattr(runtime, "own_address", lambda: "10.0.0.1:6379")


@pytest.mark.usefixtures("known")
def test_an_interrupt_costs_no_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def interrupted(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Conductor, "run", interrupted)
    words = ["--address", "h:1", "--yes", "--traffic", "own", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]
    assert main(["chaos", *words]) == 130
    assert "it was interrupted" in json.loads((tmp_path / "chaos.json").read_text())["failure"]
    with pytest.raises(ConfigurationError, match="is no URL"):
        run(make_parser().parse_args(["chaos", "--url", "10.0.0.1:8000"]))


@pytest.mark.usefixtures("known")
def test_the_command_says_what_it_would_do_and_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--blow", "stop", "--stop", "40", "--to", "decode", "--traffic", "own", "--out", str(tmp_path)]
    assert main(["chaos", *words, "--url", "http://10.0.0.1:8000", "-o", "json"]) == 0
    told = capsys.readouterr()
    intent = json.loads(told.out)
    assert {strike["kind"] for strike in intent["plan"]} == {"decode"}
    assert any("15 s" in danger for danger in intent["dangers"]), "a stop of 40 s is longer than a node may be silent"
    assert "nothing was done: --address 10.0.0.1:6379 --yes does it" in told.err
    assert not list(tmp_path.iterdir())
