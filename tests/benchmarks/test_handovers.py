from __future__ import annotations

from typing import Any

import httpx
import pytest

from benchmarks.side_by_side import experiment
from benchmarks.side_by_side.experiment import measure_handovers
from tandem.base.errors import Unavailable
from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase


def trace(request_id: str, away: bool = True) -> TraceRecord:
    reader = NodePart(
        "p0",
        "prefill",
        "r",
        [Span(TracePhase.PREFILL, 1.0, 1.1), Span(TracePhase.WRITE, 1.09, 1.102)],
        0.0,
        0.0,
    )
    writer = NodePart(
        "d0",
        "decode",
        "r",
        [Span(TracePhase.RECEIVE, 1.0, 1.103), Span(TracePhase.DECODE, 1.104, 1.2)],
        0.0,
        0.0,
    )
    return TraceRecord(
        request_id, "", "t", "s", None, "", "/v1/completions", "m", 1.0, 1e9, 1.3, 200, 512, 2, [], [], [],
        [reader, writer] if away else [reader], [],
    )  # fmt: skip


@pytest.mark.parametrize("away", [True, False])
def test_every_prompt_is_traced_under_a_name_of_its_own(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def post(url: str, **fields: Any) -> httpx.Response:
        assert fields["headers"]["x-tandem-trace"] == "1"
        names.append(fields["headers"]["x-request-id"])
        return httpx.Response(200, request=httpx.Request("POST", url))

    class Client:
        def __init__(self, url: str, key: str | None) -> None: ...

        def find(self, name: str) -> TraceRecord:
            assert name == names[-1]
            return trace(name, away)

        def close(self) -> None: ...

    monkeypatch.setattr(httpx, "post", post)
    monkeypatch.setattr(experiment, "TraceClient", Client)
    if not away:
        with pytest.raises(Unavailable, match="not sent away"):
            measure_handovers("http://r", "m", ["a"])
        return
    found = measure_handovers("http://r", "m", ["a", "b"])
    assert found == pytest.approx([4.0, 4.0])
    assert len(set(names)) == 2


def test_a_server_that_does_not_answer_is_said_to() -> None:
    with pytest.raises(Unavailable, match="not answered"):
        measure_handovers("http://127.0.0.1:9", "m", ["a"])
