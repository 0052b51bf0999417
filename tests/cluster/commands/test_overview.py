"""`tandem status` and the commands that change a cluster, without a real one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
from argparse import Namespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError, DeadlineExceeded, Unavailable
from tandem.cluster import tasks
from tandem.cluster.cli import main
from tandem.cluster.commands import deployments, operate
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.deployments import StandingDeployment, described, list_deployments, show_deployments
from tandem.cluster.commands.node_table import format_blocks
from tandem.cluster.commands.operate import CommandTarget, change_role_of, drain, drain_nodes, end_cluster
from tandem.cluster.commands.overview import Overview
from tandem.cluster.control import ClusterView, ControllerDecision, ForesightView, PoolView, RouterView, SupervisedNode
from tandem.cluster.describe import parse_role, parse_sizes
from tandem.cluster.on_ray.runtime import import_ray
from tandem.cluster.orders import DrainOrder
from tandem.router.page_state import PageState
from tandem.wire.forecasts import ForecastScore
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeMemory, SickDevice, TierStatus
from tests.cluster.direct_cluster import DirectCluster
from tests.cluster.page_states import page_with
from tests.cluster.pools.helpers import settle, status_of

STATUS = status_of(
    "decode-0", Role.DECODE, free_blocks=60, running=3, waiting=2, transfers=1,
    counters=NodeCounters(transfer_bytes_received=3 << 20),
    tiers=[
        TierStatus("cpu", 1 << 30, 8 << 30, 1000, 640, 0, 0, 0, fetched_bytes=3 << 20, mirrored_bytes=5 << 20),
        TierStatus("disk", 1 << 30, 8 << 30, 0, 0, 0, 0, 0, left_out="a load was not done in its time"),
    ],
)  # fmt: skip
VIEW = ClusterView(
    model="smollm2",
    pools=[PoolView(Role.PREFILL, 1, 0, 1, 4), PoolView(Role.DECODE, 2, 1, 0, 0, waiting_for_machines=1)],
    nodes=[
        SupervisedNode("prefill-0", Role.PREFILL, "10.0.0.2", "left out", "no memory", 0),
        SupervisedNode("decode-0", Role.DECODE, "10.0.0.3", "ready", "signal 9", 3, STATUS),
        SupervisedNode("decode-1", Role.DECODE, "", "waiting", "no machine has room for it", 0),
    ],
    routers=[RouterView("router", "http://10.0.0.1:8000", "ready", "", 0)],
    decisions=[ControllerDecision(0.0, "decode: from 1 to 2, 1 node more")],
)


def router_answer(**fields: Any) -> PageState:
    return page_with(running=3, queued=1, **fields)


def seen_of(view: ClusterView, answer: PageState | Exception | None = None) -> Overview:
    def fetch(url: str, key: str | None) -> PageState:
        if isinstance(answer, Exception):
            raise answer
        return answer or router_answer()

    return Overview.of(view, None, fetch)


def shown(view: ClusterView, answer: PageState | Exception | None = None, columns: int = 160) -> tuple[str, int]:
    text = io.StringIO()
    seen = seen_of(view, answer)
    seen.show(Console(file=text, width=columns))
    return text.getvalue(), 0 if seen.serves else 1


def test_one_screen_says_how_everything_is() -> None:
    text, status = shown(VIEW, router_answer())
    assert status == 0
    lines = text.splitlines()
    assert "serving, 3 requests running, 1 queued" in lines[1]
    assert lines[2] == "prefill: 0 of 1 node ready, between 1 and 4"
    assert lines[3] == "decode: 1 of 2 nodes ready, 1 node without a machine"
    (row,) = [line for line in lines if line.startswith("decode-0")]
    assert row.split()[:8] == ["decode-0", "decode", "10.0.0.3", "ready", "3", "2", "60/100", "1"]
    assert row.rstrip().endswith("3.0 MiB")
    (row,) = [line for line in lines if line.startswith("cpu tier")]
    assert row == (
        "cpu tier of decode-0: 1.0 GiB of 8.0 GiB, had 64% of 1000 tokens that the device had not, "
        "3.0 MiB were copied from other nodes, 5.0 MiB mirrored"
    )
    (row,) = [line for line in lines if line.startswith("disk tier")]
    assert row.endswith("1.0 GiB of 8.0 GiB")
    assert "! decode-0: its disk tier is left out: a load was not done in its time" in lines
    assert "! prefill-0: left out: no memory" in lines
    assert "! decode-0: ready again, 3 times in a row: signal 9" in lines
    assert "! decode-1: waiting: no machine has room for it" in lines
    assert lines[-1].endswith("decode: from 1 to 2, 1 node more")


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_cuts_no_name_and_no_figure(columns: int) -> None:
    """It wraps the lines by itself. A figure without its last digits is another one."""
    (row,) = [line for line in shown(VIEW, router_answer(), columns)[0].splitlines() if line.startswith("decode-0")]
    assert row.split()[:8] == ["decode-0", "decode", "10.0.0.3", "ready", "3", "2", "60/100", "1"]
    assert row.rstrip().endswith("3.0 MiB")


def test_what_the_controller_graded_is_shown_and_is_in_the_json() -> None:
    foresight = ForesightView(ForecastScore(graded=3, said=["2 of 3 came inside"]))
    view = msgspec.structs.replace(VIEW, foresight=foresight)
    assert "forecast: 2 of 3 came inside" in shown(view)[0].splitlines()
    assert seen_of(view).json()["foresight"]["score"]["graded"] == 3


def test_a_cluster_that_answers_nobody_fails_and_one_out_of_reach_from_here_does_not() -> None:
    text, status = shown(VIEW, router_answer(unhealthy="no node can decode"))
    assert status == 1
    assert "unavailable: no node can decode" in text
    router = RouterView("router", "http://r", "restarting", "killed", 1)
    text, status = shown(ClusterView("m", [], [], [router], []), router_answer())
    assert status == 1
    assert "restarting: killed" in text
    text, status = shown(VIEW, Unavailable("http://10.0.0.1:8000 does not answer"))
    assert status == 0
    assert "does not answer" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["prefil=3"], "there is no pool 'prefil': it must be one of prefill, decode, aggregated"),
        (["prefill"], "write prefill=N"),
        (["prefill=-1"], "write prefill=N"),
        (["prefill=x"], "write prefill=N"),
        (["prefill=10001"], "N from 0 to 10000"),
        (["prefill=" + 30 * "9"], "N from 0 to 10000"),
        (["decode=1", "decode=2"], "decode is given twice"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_sizes(words)


def test_limits_and_roles_that_make_no_sense_are_refused() -> None:
    assert parse_sizes(["prefill=3", "decode=0"]) == {Role.PREFILL: 3, Role.DECODE: 0}
    with pytest.raises(ConfigurationError, match="one of prefill, decode"):
        parse_role("decoder")
    for timeout_s in (-5.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="--timeout must be seconds from 0 to 1000000, not"):
            drain(CommandTarget(WhichCluster()), Namespace(nodes=["decode-0"], timeout=timeout_s))


class FakeController(DirectCluster):
    name = "chat"

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.finishes = True
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.silent = False
        self.ended = False

    async def view(self) -> ClusterView:
        return VIEW

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        self.drained.append(node_id)
        await self.may_finish.wait()
        return self.finishes

    async def change_role(self, node_id: str, role: Role) -> None:
        await self.may_finish.wait()

    async def configuration(self) -> Any:
        from tandem.cluster.config import TandemConfig

        if self.silent:
            raise DeadlineExceeded("the controller did not say what it runs")
        return TandemConfig()

    async def drain(self, timeout_s: float) -> bool:
        await self.may_finish.wait()
        return self.finishes

    async def end(self, timeout_s: float, why: str) -> None:
        self.ended = True


async def test_nodes_are_drained_by_name_or_by_the_address_of_their_machine() -> None:
    controller = FakeController()
    said: list[str] = []
    with pytest.raises(ConfigurationError, match="no node or machine decode-9: the nodes are prefill-0, decode-0"):
        await drain_nodes(controller, ["decode-0", "decode-9"], 5, print)
    assert controller.drained == []
    both = {"decode-0": True, "decode-1": True}
    assert await drain_nodes(controller, ["decode-1", "10.0.0.3"], 5, said.append) == both
    assert sorted(controller.drained) == ["decode-0", "decode-1"]
    assert "decode-0: everything was finished" in said
    controller.finishes = False
    assert await drain_nodes(controller, ["decode-0"], 5, said.append) == {"decode-0": False}


async def test_what_takes_longer_than_a_moment_is_said_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_SAY_AFTER_S", 0.0)
    controller = FakeController()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        controller.may_finish.set()

    controller.may_finish.clear()
    await drain_nodes(controller, ["decode-1"], 5, say)
    assert said[0] == "decode-1: finishing what it has (up to 5 s)"
    controller.may_finish.clear()
    await change_role_of(controller, "decode-1", Role.PREFILL, say)
    assert said[-1] == "decode-1: finishing what it has (up to 60 s), to become a prefill node"


async def test_who_gives_up_on_down_is_told_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "own_address", lambda: "10.0.0.9:6379")
    controller = FakeController()
    controller.may_finish.clear()
    said: list[str] = []
    down = asyncio.create_task(end_cluster(controller, now=False, say=said.append))  # type: ignore[arg-type]
    await settle()
    down.cancel()
    await asyncio.gather(down, return_exceptions=True)
    assert said[-1] == "it takes nothing new, and is not ended: `tandem down --now` ends it"
    assert not controller.ended


async def test_down_finishes_what_runs_and_ends_also_a_controller_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operate, "own_address", lambda: "10.0.0.9:6379")
    said: list[str] = []
    polite, silent, hurried = FakeController(), FakeController(), FakeController()
    silent.silent = True
    assert await end_cluster(polite, now=False, say=said.append)  # type: ignore[arg-type]
    assert not await end_cluster(silent, now=False, say=said.append)  # type: ignore[arg-type]
    assert not await end_cluster(hurried, now=True, say=said.append)  # type: ignore[arg-type]
    assert all(controller.ended for controller in (polite, silent, hurried))
    assert "cannot be drained" in said[-1]


@pytest.mark.parametrize(("words", "finished", "status"), [([], True, 0), ([], False, 1), (["--now"], False, 0)])
def test_down_ends_with_1_when_not_everything_was_finished(
    words: list[str], finished: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operate, "down", lambda which, now, say: finished)
    assert main(["down", *words, "-o", "json"]) == status
    assert json.loads(capsys.readouterr().out) == {"finished": finished}


def test_the_overview_as_json_says_the_same_and_keeps_epochs_to_itself() -> None:
    plain = seen_of(VIEW).json()
    assert [(pool["wanted"], pool["max_nodes"]) for pool in plain["pools"]] == [(1, 4), (2, None)]
    assert plain["routers"][0]["answer"]["running"] == 3
    assert "epoch" not in json.dumps(plain)
    away = seen_of(VIEW, Unavailable("does not answer"))
    assert away.json()["routers"][0]["unreachable"] == "does not answer"
    assert away.serves


@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_a_watched_cluster_is_shown_where_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """While a cluster is joined, what libraries print goes to the log."""

    class Watched(DirectCluster):
        looks = 0

        async def view(self) -> ClusterView:
            self.looks += 1
            if self.looks == 3:
                raise KeyboardInterrupt
            return msgspec.structs.replace(VIEW, routers=[])

    def joined(which: WhichCluster, work: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return asyncio.run(work(Watched()))

    monkeypatch.setattr(operate, "with_controller", joined)
    assert main(["status", "--watch", "0.2", *words]) == 130
    assert capsys.readouterr().out.count("smollm2") == 2


def test_deployments_are_listed_with_what_is_wrong_with_each() -> None:
    whole = described("chat", VIEW)
    assert whole.serves
    assert (whole.urls, whole.ready, whole.wanted) == (
        ["http://10.0.0.1:8000"], {"prefill": 0, "decode": 1}, {"prefill": 1, "decode": 2},
    )  # fmt: skip
    silent = StandingDeployment("code", trouble="the controller did not answer")
    broken = described("draft", msgspec.structs.replace(VIEW, pools=VIEW.pools[:1]))
    no_writer = [VIEW.pools[0], PoolView(Role.ENCODE, 1, 1, 0, 0)]
    drawn = described("images", msgspec.structs.replace(VIEW, pools=no_writer))
    assert (silent.serves, broken.serves, drawn.serves) == (False, False, False)
    console = Console(width=200, record=True, file=io.StringIO())
    show_deployments([whole, silent, broken], console)
    said = console.export_text()
    assert "prefill 0 of 1, decode 1 of 2" in said
    assert "the controller did not answer" in said
    assert "no node that can decode is ready" in said


def nodes_with(*hosts: str, **status: Any) -> ClusterView:
    told = msgspec.structs.replace(STATUS, **status)
    nodes = [SupervisedNode(f"decode-{n}", Role.DECODE, host, "ready", "", 0, told) for n, host in enumerate(hosts)]
    return msgspec.structs.replace(VIEW, nodes=nodes)


def test_what_nodes_lack_is_said() -> None:
    assert format_blocks(60, 100, 0) == "60/100"
    assert format_blocks(60, 100, 7) == "60/100 (7 quarantined)"
    assert format_blocks(60, 100, 7, 3) == "60/100 (7 quarantined, 3 pinned)"
    slower = "it computes without the native library, several times slower: no g++"
    view = nodes_with("10.0.0.3", slower=slower, sick=(SickDevice("cuda:3", "Xid 79: it has fallen off the bus"),))
    text, _ = shown(view)
    assert f"! decode-0: {slower}" in text
    assert "! decode-0: cuda:3: Xid 79: it has fallen off the bus" in text
    assert seen_of(view).json()["nodes"][0]["status"]["slower"] == slower


def test_the_memory_of_nodes_counts_the_weights_that_they_share_once() -> None:
    memory = NodeMemory(256 << 20, True, 64 << 20, 192 << 20)
    view = nodes_with("10.0.0.3", "10.0.0.3", "10.0.0.4", memory=memory)
    lines = shown(view)[0].splitlines()
    assert "memory of decode-0: weights 256.0 MiB (shared), KV 64.0 MiB, its own 192.0 MiB" in lines
    assert "memory of all nodes: 1.2 GiB, shared weights counted once" in lines
    assert seen_of(view).json()["nodes"][0]["status"]["memory"]["own"] == 192 << 20


@pytest.mark.parametrize("recorded", [True, False])
def test_a_command_that_changes_a_deployment_says_first_which(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = FakeController()
    monkeypatch.setattr(operate, "joined", lambda which: contextlib.nullcontext())
    monkeypatch.setattr(operate, "own_address", lambda: "10.0.0.9:6379")
    url = "https://127.0.0.1:9000" if recorded else ""
    monkeypatch.setattr(operate, "url_of", lambda address, name: url)
    import_ray()
    from tandem.cluster.on_ray import remote_controller

    monkeypatch.setattr(remote_controller, "standing", lambda: ["chat"])
    monkeypatch.setattr(remote_controller, "the_controller", lambda name: controller)
    said: list[str] = []
    options = Namespace(nodes=["decode-0"], timeout=1.0)
    drain(CommandTarget(WhichCluster(), say=said.append), options)
    assert said == [f"chat at {url or 'http://10.0.0.1:8000'}:", "decode-0: everything was finished"]


class EndedServer:
    """A `tandem serve` of this machine that a command has joined, and that ends with its Ray when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import_ray()
        from tandem.cluster.on_ray import remote_controller

        self.controller = FakeController()
        self.controller.end = self.controller.drain_node = self._end  # type: ignore[method-assign]
        self._ray = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._ray.getsockname()[1]}"
        for commands in (operate, deployments):
            monkeypatch.setattr(commands, "joined", lambda which: contextlib.nullcontext())
        monkeypatch.setattr(operate, "own_address", lambda: address)
        monkeypatch.setattr(remote_controller, "chosen", lambda name: "chat")
        for name in ("find_controller", "the_controller"):
            monkeypatch.setattr(remote_controller, name, lambda name: self.controller)

    def end(self) -> None:
        self._ray.close()

    async def _end(self, *_: object) -> Any:
        self.end()
        await asyncio.Event().wait()


def test_down_is_done_when_the_server_has_ended_with_its_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends as soon as its end is recorded. Ray would wait for a minute, and end this process with a line of its own."""
    EndedServer(monkeypatch)
    said: list[str] = []
    assert operate.down(WhichCluster(), now=False, say=said.append)
    assert said[-1] == "everything was finished; it is down"


def test_down_says_what_became_of_a_server_that_ends_before_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EndedServer(monkeypatch)
    server.controller.drain = server.controller.end  # type: ignore[method-assign]
    said: list[str] = []
    with pytest.raises(Unavailable, match="has ended"):
        operate.down(WhichCluster(), now=False, say=said.append)
    assert said[-1] == "finishing what is running (up to 60 s)", "not that it is still there"


def test_a_command_whose_server_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    EndedServer(monkeypatch)
    with pytest.raises(Unavailable, match=r"the server whose Ray was at 127\.0\.0\.1:\d+ has ended"):
        CommandTarget(WhichCluster(), say=lambda line: None).ask(DrainOrder("decode-0", 5.0))


def test_the_list_of_deployments_does_not_wait_for_a_server_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for its control store for a minute, and keeps the thread that asked it."""
    server, over = EndedServer(monkeypatch), threading.Event()
    from tandem.cluster.on_ray import remote_controller

    def standing() -> list[str]:
        server.end()
        over.wait(20)
        return ["chat"]

    monkeypatch.setattr(remote_controller, "standing", standing)
    with pytest.raises(Unavailable, match="has ended"):
        list_deployments(WhichCluster())
    over.set()
