"""How long a request would have taken in another cluster, simulated from the traffic that the router remembers."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster.trace.why import Explanation
from tandem.cluster.trace.why_text import show_explanation
from tandem.loadgen.traces import TraceRow
from tandem.router.page_state import NodeRow, PageState, RouterState
from tandem.router.recent import LATEST, RequestAccount
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import simulate
from tandem.simulator.what_if import compared, other_clusters
from tests.router.test_router_recent import QUICK
from tests.simulator.worlds import a_setup

ROWS = [TraceRow(0.02 * index, 500 + 40 * index, 20 + index) for index in range(12)]
STARTED_AT = 1_000_000.0


def measured(setup: SimulationSetup) -> list[RequestAccount]:
    """As a router would remember this cluster and traffic."""
    accounts = []
    rows = setup.traffic.rows

    def on_answer(index: int, first_s: float, whole_s: float) -> None:
        accounts.append(
            msgspec.structs.replace(
                QUICK,
                request_id=f"r{index}",
                ended_at=STARTED_AT + rows[index].arrival_s + whole_s,
                reading_s=0.0,
                node_wait_s=0.0,
                handover_s=0.0,
                prefill_s=first_s,
                decode_s=whole_s - first_s,
                prompt_tokens=rows[index].input_tokens,
                output_tokens=rows[index].output_tokens,
            )
        )

    simulate(setup, on_answer=on_answer)
    return sorted(accounts, key=lambda account: account.ended_at)


def state(accounts: Sequence[RequestAccount], *roles: str) -> PageState:
    router = RouterState("m", "1", "least_wait", None, False, 0, 0, 9, 9, 0, 0.0, None)
    nodes = [NodeRow(f"{role}-{index}", role, "ready", "") for index, role in enumerate(roles)]
    return PageState(1.0, router, 2.0, 0.1, nodes, [], [], list(accounts), [])


def test_the_cluster_as_it_was_is_found_again_and_others_are_as_simulated() -> None:
    here, more = a_setup(ROWS), a_setup(ROWS, prefill=2)
    accounts = measured(here)
    would = other_clusters(state(accounts, "prefill", "decode"), "r9", here.config, here.costs)
    assert would.requests == len(ROWS)
    assert would.first_token_error == pytest.approx(0.0, abs=1e-3)
    assert would.total_error == pytest.approx(0.0, abs=1e-3)
    assert [other.what for other in would.others] == ["aggregated", "one more prefill node", "one more decode node"]
    (there,) = (account for account in measured(more) if account.request_id == "r9")
    (found,) = (account for account in accounts if account.request_id == "r9")
    assert would.others[1].first_token_s == pytest.approx(there.prefill_s - found.prefill_s, abs=1e-3)
    assert would.others[1].first_token_s < 0  # it stood in line


def test_what_was_cached_is_cached_before_the_traffic_begins() -> None:
    accounts = [
        msgspec.structs.replace(account, cached_tokens=account.prompt_tokens // 16 * 16 - 32)
        for account in measured(a_setup(ROWS))
    ]
    setup = a_setup(ROWS)
    cold = other_clusters(state(measured(setup), "prefill", "decode"), "r3", setup.config, setup.costs)
    warm = other_clusters(state(accounts, "prefill", "decode"), "r3", setup.config, setup.costs)
    assert warm.first_token_s < 0.7 * cold.first_token_s


def test_an_aggregated_cluster_is_compared_with_two_roles() -> None:
    setup = a_setup(ROWS, prefill=0, decode=0, aggregated=3)
    would = other_clusters(state(measured(setup), *["aggregated"] * 3), "r0", setup.config, setup.costs)
    assert [other.what for other in would.others] == ["1 prefill and 2 decode", "one more aggregated node"]


def test_where_nothing_can_be_said_the_reason_is() -> None:
    setup, accounts = a_setup(ROWS), measured(a_setup(ROWS))
    replace = msgspec.structs.replace
    for known, name, reason in (
        (accounts, "r99", "is not among the last 200 requests"),
        ([replace(one, finish="abort") for one in accounts], "r3", "was not answered to its end"),
        # Its neighbours are forgotten.
        (
            [replace(accounts[-1], request_id=f"r{n}") for n in range(LATEST)],
            "r3",
            "what ran beside it is not known any",
        ),
        ([replace(one, prompt_tokens=100_000) for one in accounts], "r3", "does not serve this request"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            other_clusters(state(known, "prefill", "decode"), name, setup.config, setup.costs)


def explanation(name: str) -> Explanation:
    return Explanation(name, 1.0, 0.5, [], [], "a line", [], [], [], traced=False)


def test_it_is_shown_with_its_error() -> None:
    setup, out = a_setup(ROWS), Console(file=io.StringIO(), width=200)
    shown = state(measured(setup), "prefill", "decode")
    why = compared(explanation("r9"), shown, setup.config, setup.costs, Console(file=io.StringIO()))
    show_explanation(out, why)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "a simulation of 12 requests around it (its first tokens are 0% off in the median" in text
    assert "one more prefill node: −" in text

    silent = compared(explanation("other"), shown, setup.config, setup.costs, Console(file=io.StringIO()))
    assert silent.would_have_been is None
    assert "not compared with other clusters" in silent.remarks[0]
