"""The costs that a serving cluster's nodes have learnt are the simulator's at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.router.page_state import PageState
from tandem.simulator.learnt import learnt_costs
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters
from tandem.wire.step_costs import StepCosts
from tests.router.test_router_recent import QUICK
from tests.simulator.test_what_if import state

URL = "http://router.test:8000"
READS = StepCosts(
    (0.02, 0.001, 0.0, 0.0002, 1e-6, 0.0, 0.0, 0.0, 0.0, 0.0),
    prompts_seen=90,
    prompts_error=0.04,
    most_prompt_tokens=900,
)
WRITES = StepCosts(
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.002, 0.0005, 0.0, 1e-6), rows_seen=70, rows_error=0.06, most_rows=12
)

BOTH = msgspec.structs.replace(READS, rows_seen=70)


def node(role: str, costs: StepCosts | None, **fields: Any) -> dict[str, Any]:
    counters = NodeCounters(
        step_costs=costs, transfer_bytes_received=16 * 1024 * 50, transfer_blocks_received=50
    ).in_full()
    known = {"max_model_len": 4096, "block_size": 16, "total_blocks": 2000, "start_s": 3.5}
    return {"role": role, **known, "counters": counters, **fields}


def page(*roles: str) -> PageState:
    told = state([msgspec.structs.replace(QUICK, reading_s=0.004)], *roles)
    return msgspec.structs.replace(told, router=msgspec.structs.replace(told.router, handover_s=0.03))


def answering(nodes: list[dict[str, Any]]) -> httpx.MockTransport:
    bodies: dict[str, bytes] = {
        "/cluster": msgspec.json.encode({"router": {}, "nodes": nodes}),
        "/ui/state": msgspec.json.encode(page(*(one["role"] for one in nodes))),
    }
    return httpx.MockTransport(lambda request: httpx.Response(200, content=bodies[request.url.path]))


def test_each_role_has_the_costs_of_its_nodes() -> None:
    faster = msgspec.structs.replace(READS, coefficients=tuple(one / 3 for one in READS.coefficients))
    nodes = [node("prefill", READS), node("prefill", faster), node("decode", WRITES), node("encode", None)]
    costs, note = learnt_costs(URL, answering(nodes))
    prefill, decode = costs[Role.PREFILL], costs[Role.DECODE]
    pairs = 300 * 100 + 300 * 301 / 2
    between = prefill.step_s([(256, 100)]), prefill.step_s([(512, 100)])
    assert between[0] < READS.prompt_s(300, pairs) * 2 / 3 < between[1]
    assert prefill.step_s([(512, 100)]) == pytest.approx(READS.prompt_s(512, 512 * 100 + 512 * 513 / 2) * 2 / 3)
    assert decode.step_s([], 8, 8 * 500.0) == pytest.approx(WRITES.rows_s(8, 8 * 500))
    # A step that does both reads the weights once.
    both = costs[Role.AGGREGATED].step_s([(128, 0)], 8, 8 * 500.0)
    assert both == pytest.approx(prefill.step_s([(128, 0)]) + WRITES.rows_s(8, 8 * 500) - 0.01, rel=1e-3)
    assert (decode.blocks, decode.kv_bytes_per_token, decode.transfer.handover_s) == (2001, 1024, 0.03)
    assert (decode.request.arrive_s, decode.start_s) == (0.004, 3.5)
    for words in ("180 measured, of at most 900", "4% wrong", "70 measured", "6% wrong"):
        assert words in note


TOO_LITTLE = "what its steps take that {}: let it serve"


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("prefill", READS), node("decode", None)], TOO_LITTLE.format("write answers")),
        ([node("aggregated", msgspec.structs.replace(WRITES, prompts_seen=19))], TOO_LITTLE.format("read prompts")),
        ([{"role": "aggregated", "max_model_len": 4096, "block_size": 16}], TOO_LITTLE.format("read prompts")),
        ([node("aggregated", BOTH), node("aggregated", BOTH, tensor_parallel=2)], "aggregated nodes of .* are of several widths"),
        ([node("aggregated", BOTH, context_parallel=2)], "read prompts together .* no plan has such nodes"),
    ],
)  # fmt: skip
def test_a_cluster_whose_nodes_have_no_common_costs_yet_says_so(nodes: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        learnt_costs(URL, answering(nodes))


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that commands reach at URL, and as the one that runs on this machine."""
    learnt: Callable[..., Any] = learnt_costs
    transport = answering([node("prefill", READS), node("decode", WRITES)])
    monkeypatch.setattr("tandem.simulator.options.learnt_costs", lambda url: learnt(url, transport))
    monkeypatch.setattr("tandem.simulator.options.choose_url", lambda named: named or URL)


@pytest.mark.parametrize("source", ["running", URL])
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_commands_take_them_in_place_of_a_file(
    serving: None, capsys: pytest.CaptureFixture[str], command: str, source: str
) -> None:
    given = ["--costs", source, "--rate", "2", "--duration", "3", "--input", "200", "--output", "20"]
    more = {"simulate": [], "plan": ["--cost", "prefill=1,decode=1", "--most-nodes", "3"]}[command]
    assert main([command, *given, "--slo", "ttft=1s,itl=60ms", *more, "-o", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert "costs that the nodes have learnt. steps that read prompts: 90 measured" in said.err
