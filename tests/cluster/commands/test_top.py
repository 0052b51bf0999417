"""`tandem top`."""

from __future__ import annotations

import io

import httpx
import msgspec
import pytest
from rich.console import Console

from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.top import run, screen
from tandem.router.metrics import Moment
from tandem.router.page_state import NodeRow, PageState
from tandem.wire.errors import ConfigurationError
from tests.cluster.trace.test_why import state


def busy(output: int, now: float) -> PageState:
    node = NodeRow(
        "d0",
        "decode",
        "ready",
        "",
        running=3,
        waiting=1,
        used_blocks=40,
        total_blocks=100,
        output_tokens=output,
    )
    lost = NodeRow("p0", "prefill", "lost", "it is silent")
    return msgspec.structs.replace(
        state(), now=now, nodes=[node, lost], moments=[Moment(0.0, 4, 0, 3, 4, 9, 9, 0.5, 3, 0)]
    )


def shown(*states: PageState | None) -> str:
    out = Console(file=io.StringIO(), width=150)
    out.print(screen(*states))  # type: ignore[arg-type]
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_it_shows_nodes_the_last_ten_minutes_and_the_slowest_by_cause() -> None:
    text = shown(busy(100, 1.0), None)
    assert "60/100" in text
    assert "within 2 s for 75.0%" in text
    assert "by cause: a node's line 1×" in text
    assert text.index("p0") < text.index("d0"), "what needs a person stands first"


def test_in_a_narrow_terminal_an_id_can_still_be_copied() -> None:
    request_id = "0123456789abcdef" * 2
    known = state()
    slow = known.slowest[0]
    slow = msgspec.structs.replace(slow, account=msgspec.structs.replace(slow.account, request_id=request_id))
    out = Console(file=io.StringIO(), width=80)
    out.print(screen(msgspec.structs.replace(known, slowest=[slow]), None))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert request_id in text
    assert "…" not in text.split("slowest requests")[1]


def test_rates_are_of_the_time_between_two_looks() -> None:
    row = next(line for line in shown(busy(300, 3.0), busy(100, 1.0)).splitlines() if line.startswith("d0"))
    assert row.split()[-1] == "100"


def test_its_status_says_whether_requests_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    unhealthy = msgspec.structs.replace(
        state(), router=msgspec.structs.replace(state().router, unhealthy="no node")
    )
    for told, status in ((state(), 0), (unhealthy, 1)):
        transport = httpx.MockTransport(
            lambda request, told=told: httpx.Response(200, content=msgspec.json.encode(told))
        )
        client = ApiClient("http://router", None, transport)
        assert run(client, Console(file=io.StringIO()), 2.0, once=True, as_json=True) == status
    assert '"inter_token_s"' in capsys.readouterr().out


def test_a_period_that_would_be_a_burden_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--every must be"):
        run(ApiClient("http://router"), Console(), 0.0, once=False, as_json=False)
