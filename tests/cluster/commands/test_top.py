"""`tandem top`."""

from __future__ import annotations

import io

import httpx
import msgspec
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.top import run, screen
from tandem.router.page_state import NodeRow, PageState
from tandem.router.recent import ADVICE, Moment
from tests.cluster.page_states import state


def busy(output: int, now: float) -> PageState:
    node = NodeRow(
        "d0", "decode", "ready", "", running=3, waiting=1, used_blocks=40, total_blocks=100, output_tokens=output
    )
    lost = NodeRow("p0", "prefill", "lost", "it is silent")
    return msgspec.structs.replace(
        state(), now=now, nodes=[node, lost],
        moments=[Moment(0.0, 4, first_in_time=3, tokens_in_time=4, prompt_tokens=9, output_tokens=9, worst_first_s=0.5, running=3)],
    )  # fmt: skip


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
    row = next(line for line in shown(busy(300, 3.0), busy(100, 1.0)).splitlines() if line.startswith("d0"))
    assert row.split()[-1] == "100", "rates are of the time between two looks"


def narrow(state: PageState) -> str:
    out = Console(file=io.StringIO(), width=80)
    out.print(screen(state, None))
    return out.file.getvalue()  # type: ignore[attr-defined]


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
    lines = narrow(msgspec.structs.replace(known, slowest=slow, nodes=nodes)).splitlines()
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
    text = narrow(msgspec.structs.replace(state(), slowest=slow))
    assert all(one in text for one in ids)


def test_what_went_wrong_is_said() -> None:
    moment = Moment(0.0, errors=2, refused=3, restarts=1)
    node = NodeRow("d0", "decode", "ready", "", notes=["its disk tier is left out: it hangs"])
    text = shown(msgspec.structs.replace(state(), moments=[moment], nodes=[node]), None)
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
