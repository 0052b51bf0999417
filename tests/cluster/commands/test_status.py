"""`tandem status --url` and `tandem top`: the cluster on one screen, from one router; and what a start shows of itself."""

from __future__ import annotations

import io
import json
import os
import ssl
from typing import Any, TextIO, cast

import httpx
import msgspec
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError, InternalError, RequestError, Unavailable
from tandem.cluster.api_client import ApiClient, trusted
from tandem.cluster.cli import make_parser
from tandem.cluster.commands import overview
from tandem.cluster.commands.output import UnfailingOutput
from tandem.cluster.commands.overview import Overview
from tandem.cluster.commands.progress import Display, StartStep
from tandem.cluster.commands.ready_lines import ready_lines, timing_lines
from tandem.cluster.commands.top import run, screen
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage
from tandem.router.page_state import NodeRow, PageState, PoolRow, ProcessState
from tandem.router.recent import ADVICE, Moment
from tandem.wire.forecasts import ForecastScore
from tests.cluster.page_states import page_with, state


def page(**router: Any) -> PageState:
    nodes = [
        NodeRow("prefill-0", "prefill", "unknown", "not heard of yet", is_silent=True),
        NodeRow("decode-1", "decode", "left out", "other weights", is_silent=True),
        NodeRow("decode-0", "decode", "ready", "", 3, 1, used_blocks=10, total_blocks=100, bytes_received=3 << 20),
    ]
    pools = [PoolRow("decode", wanted=3, ready=1, starting=1, waiting=1)]
    return msgspec.structs.replace(page_with(model="tiny", running=1, **router), nodes=nodes, pools=pools)


def shown(state: PageState) -> tuple[int, str]:
    out = io.StringIO()
    seen = Overview.of_router("http://r", None, lambda url, key: state)
    seen.show(Console(file=out, width=80))
    return 0 if seen.serves else 1, out.getvalue()


def test_every_node_has_a_line_that_fits_and_trouble_has_a_reason() -> None:
    status, text = shown(page())
    assert status == 0
    lines = text.splitlines()
    assert lines[:2] == ["tiny", "http://r: serving, 1 request running, 0 queued"]
    assert "decode: 1 of 3 nodes ready, 1 starting, 1 node without a machine" in lines
    (line,) = [line for line in lines if line.startswith("decode-0")]
    assert all(part in line for part in ("ready", "90/100", "3.0 MiB"))
    assert "prefill-0: not heard of yet" in text
    assert "! decode-1: other weights" in lines, "a node that is no member is shown, too"
    assert all(len(line) <= 80 for line in lines)


def test_what_forecasts_were_worth_is_said_and_a_router_process_that_does_not_answer_is_named() -> None:
    score = ForecastScore(graded=3, said=["the last one came inside", "2 of 3 were inside [all]"])
    processes = [ProcessState("router", True), ProcessState("router~2", False)]
    lines = shown(page(forecasts=score, processes=processes))[1].splitlines()
    assert "forecast: the last one came inside" in lines
    assert "forecast: 2 of 3 were inside [all]" in lines
    assert "! router: no answer from router~2: not counted" in lines


def test_a_cluster_that_cannot_serve_says_why_and_fails() -> None:
    status, text = shown(page(unhealthy="no decode node", draining=True))
    assert status == 1
    assert "unavailable: no decode node" in text
    assert "draining" in text


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (httpx.Response(401, text="who are you"), RequestError, "who are you"),
        (httpx.Response(200, json={"other": 1}), InternalError, "did not answer like a Tandem router"),
        (httpx.Response(302, headers={"location": "https://tandem/"}), Unavailable, "sends to https://tandem/: name"),
    ],
)
def test_what_is_fetched_is_checked(answer: httpx.Response, error: type[Exception], why: str) -> None:
    client = ApiClient("http://tandem", None, httpx.MockTransport(lambda request: answer))
    with pytest.raises(error, match=why):
        client.read("/ui/state", PageState)


def test_a_watch_that_cannot_be_meant_is_refused_before_anything_is_asked() -> None:
    options = make_parser().parse_args(["status", "--url", "http://127.0.0.1:1", "--watch", "0"])
    with pytest.raises(ConfigurationError, match=r"--watch must be seconds from 0\.2"):
        options.run(options)


@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_a_watch_shows_the_router_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    asked: list[str] = []

    class Client:
        def __init__(self, url: str, key: str | None) -> None:
            self._url = url

        def read(self, path: str, kind: Any) -> Any:
            if path == "/cluster":
                return {"router": {"model": "tiny"}, "pools": [], "nodes": []}
            asked.append(self._url + path)
            if len(asked) == 3:
                raise InternalError("it is gone")
            return page()

        def close(self) -> None: ...

    monkeypatch.setattr(overview, "ApiClient", Client)
    options = make_parser().parse_args(["status", "--url", "http://router", "--watch", "0.2", *words])
    with pytest.raises(InternalError, match="it is gone"):
        options.run(options)
    assert asked == ["http://router/ui/state"] * 3
    if words:
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [look["router"]["model"] for look in looks] == ["tiny", "tiny"]


def test_a_certificate_is_verified_however_the_urls_scheme_is_written() -> None:
    for url in ("https://127.0.0.1", "HTTPS://127.0.0.1"):
        assert isinstance(trusted(url), ssl.SSLContext)
    for url in ("http://a..b:8000", f"http://{'a' * 64}:8000", "ftp://a"):
        with pytest.raises(ConfigurationError, match="is no URL"):
            ApiClient(url)


def busy(output: int, now: float) -> PageState:
    node = NodeRow(
        "d0", "decode", "ready", "", running=3, waiting=1, used_blocks=40, total_blocks=100, output_tokens=output
    )
    lost = NodeRow("p0", "prefill", "lost", "it is silent")
    return msgspec.structs.replace(
        state(), now=now, nodes=[node, lost],
        moments=[Moment(0.0, 4, first_in_time=3, tokens_in_time=4, prompt_tokens=9, output_tokens=9, worst_first_s=0.5, running=3)],
    )  # fmt: skip


def top_shown(now: PageState, before: PageState | None = None, width: int = 150) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(screen(now, before))
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_it_shows_nodes_the_last_ten_minutes_and_the_slowest_by_cause() -> None:
    text = top_shown(busy(100, 1.0))
    assert "60/100" in text
    assert "within 2 s for 75.0%" in text
    assert "by cause: a node's line 1×" in text
    assert text.index("p0") < text.index("d0"), "what needs a person stands first"
    row = next(line for line in top_shown(busy(300, 3.0), busy(100, 1.0)).splitlines() if line.startswith("d0"))
    assert row.split()[-1] == "100", "rates are of the time between two looks"


def test_everything_can_be_read_in_80_columns() -> None:
    known = state()
    slow = [
        msgspec.structs.replace(
            known.slowest[0],
            account=msgspec.structs.replace(
                known.slowest[0].account,
                request_id=f"0123456{number:x}" + "89abcdef" * 3,
                prefill_node=f"prefill-{number}",
                decode_node=f"decode-{number}",
            ),
            cause=cause,
        )
        for number, cause in enumerate(ADVICE)
    ]
    nodes = [NodeRow(f"aggregated-{number}", "aggregated", "ready", "") for number in range(9, 12)]
    lines = top_shown(msgspec.structs.replace(known, slowest=slow, nodes=nodes), width=80).splitlines()
    rows = [next(line for line in lines if line.startswith(f"0123456{number:x}")) for number in range(10)]
    assert [row.split()[-1] for row in rows] == [f"p{number}→d{number}" for number in range(10)]
    told = " ".join(" ".join(line.split()) for line in lines)
    for cause in ("computing the prompt", "it failed", "the handover", "one gap in its answer"):
        assert cause in told, "no word is broken"
    assert any(line.startswith("aggregated-11 ") for line in lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in told


def test_what_is_shown_of_an_id_tells_it_from_the_others() -> None:
    known = state().slowest[0]
    ids = ["job-2026-11-27-a", "job-2026-11-27-b"]
    slow = [
        msgspec.structs.replace(known, account=msgspec.structs.replace(known.account, request_id=one)) for one in ids
    ]
    text = top_shown(msgspec.structs.replace(state(), slowest=slow), width=80)
    assert all(one in text for one in ids)


def test_what_went_wrong_is_said() -> None:
    moment = Moment(0.0, errors=2, refused=3, restarts=1)
    node = NodeRow("d0", "decode", "ready", "", notes=["its disk tier is left out: it hangs"])
    text = top_shown(msgspec.structs.replace(state(), moments=[moment], nodes=[node]))
    assert "2 failed, 3 refused, 1 restarts of nodes" in text
    assert "! d0: its disk tier is left out: it hangs" in text


def test_its_status_says_whether_requests_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    unhealthy = msgspec.structs.replace(state(), router=msgspec.structs.replace(state().router, unhealthy="no node"))
    for told, status in ((state(), 0), (unhealthy, 1)):
        transport = httpx.MockTransport(
            lambda request, told=told: httpx.Response(200, content=msgspec.json.encode(told))
        )
        client = ApiClient("http://router", None, transport)
        assert run(client, Console(file=io.StringIO()), 2.0, once=True, as_json=True) == status
    assert '"inter_token_s"' in capsys.readouterr().out


@pytest.mark.parametrize("period", [0.0, float("nan"), 1e12])
def test_a_period_that_cannot_be_meant_is_refused(period: float) -> None:
    with pytest.raises(ConfigurationError, match="--every must be"):
        run(ApiClient("http://router"), Console(), period, once=False, as_json=False)


def test_who_stops_reading_does_not_end_who_prints() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    console = Console(file=cast("TextIO", UnfailingOutput(stream)))
    console.print("one")
    assert os.read(reading, 100) == b"one\n"
    os.close(reading)
    console.print("two")
    console.print("three")
    stream.close()  # which would fail, too, if it still led into the pipe


def test_a_full_disk_does_not_either() -> None:
    with open("/dev/full", "w") as stream:
        console = Console(file=cast("TextIO", UnfailingOutput(stream)))
        console.print("x\n" * io.DEFAULT_BUFFER_SIZE)
        console.print("more")


def test_what_is_read_is_what_was_said() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    output = UnfailingOutput(stream)
    output.write("grün\n")
    output.flush()
    assert stream.buffer.getvalue() == "grün\n".encode()
    assert (output.encoding, output.isatty()) == ("utf-8", False)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_activity_lasts_until_the_next_of_its_process(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    seconds = [100.0]
    monkeypatch.setattr("tandem.cluster.commands.progress.time.monotonic", lambda: seconds[0])
    display = Display(Console(file=io.StringIO(), force_terminal=is_terminal))
    display.start()
    with display.step("ray", "starting", "running"):
        display.progress("decode-0", "loading weights", 0.0)
        seconds[0] += 2
        display.progress("decode-0", "loading weights", 0.5)
    display.progress("decode-0", "warming up", 0.0)
    seconds[0] += 1
    display.ready("decode-0", "decode")
    display.stop()
    found = display.steps()
    assert found == [
        StartStep("ray", "starting", 0.0, 2.0),
        StartStep("decode-0", "loading weights", 0.0, 2.0),
        StartStep("decode-0", "warming up", 2.0, 1.0),
    ]
    assert timing_lines(found)[1].split() == ["0.00", "s", "ray", "2.00", "s", "starting"]


def test_an_address_in_brackets_is_printed_whole() -> None:
    account = ClusterAccount(ClusterStage.SERVING, [], 0, "http://[fd00::1]:8000", "tiny")
    lines = ready_lines(account, ClusterView("tiny", [], [], [], []), TandemConfig(), "/tmp", 1.0, detached=False)
    out = io.StringIO()
    Console(file=out).print("\n".join(lines), soft_wrap=True)
    assert out.getvalue().count("http://[fd00::1]:8000") == 3
