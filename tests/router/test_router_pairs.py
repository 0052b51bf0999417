"""Handovers between machines that are far from each other are avoided where waiting is cheaper."""

from __future__ import annotations

import msgspec
import pytest

from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.policy.choose import make_policy
from tandem.router.policy.pairs import HALVES_S, MOST_PAIRS, PairTimes
from tandem.router.policy.views import NodeView, RoutingDecision, RoutingRequest
from tests.clock import Clock
from tests.router.test_router_policy import ask, names, node, pools
from tests.wire.members import endpoint_at


def at(view: NodeView, machine: str) -> NodeView:
    info = msgspec.structs.replace(view.info, peer_endpoint=endpoint_at(4000, machine))
    return msgspec.structs.replace(view, info=info)


P0, P1 = at(node("p0"), "10.0.0.1"), at(node("p1"), "10.0.1.1")
D0, D1 = at(node("d0"), "10.0.0.2"), at(node("d1"), "10.0.1.2")


def known(clock: Clock, **waited_s: float) -> PairTimes:
    """Waits for the handover of 500 tokens, such as p0d1=0.4."""
    times, nodes = PairTimes(clock), {"p0": P0, "p1": P1, "d0": D0, "d1": D1}
    for pair, seconds in waited_s.items():
        for _ in range(3):
            times.observe(nodes[pair[:2]].info, nodes[pair[2:]].info, 500, seconds)
    return times


def decide(
    times: PairTimes,
    *nodes: NodeView,
    request: RoutingRequest | None = None,
    name: PolicyName = PolicyName.LEAST_WAIT,
    local: LocalPrefill = LocalPrefill.NEVER,
) -> RoutingDecision:
    return make_policy(name, local, times)(pools(*nodes, handover=0.005), request or ask())


def test_a_slow_link_is_avoided() -> None:
    times = known(Clock(), p0d0=0.004, p0d1=0.8, p1d0=0.8, p1d1=0.004)
    for turn in range(8):
        prefill, decode = names(decide(times, P0, P1, D0, D1, request=ask(turn=turn)))
        assert (prefill, decode) in {("p0", "d0"), ("p1", "d1")}


def test_it_is_used_when_the_near_nodes_have_longer_lines() -> None:
    times = known(Clock(), p0d0=0.004, p0d1=0.8)
    busy, longer = (at(node("d0", running=running), "10.0.0.2") for running in (30, 200))
    assert names(decide(times, P0, busy, D1)) == ("p0", "d0")
    assert names(decide(times, P0, longer, D1)) == ("p0", "d1")


def test_the_decision_says_why() -> None:
    decision = decide(known(Clock(), p0d0=0.004, p0d1=0.8), P0, at(node("d0", running=5), "10.0.0.2"), D1)
    assert "decode d0 (nearer than p0 and d1)" in decision.reason


def test_a_longer_prompt_is_expected_to_take_longer() -> None:
    times = known(Clock(), p0d0=0.0, p0d1=0.1)
    assert times.longer_s(P0.info, D1.info, 1000) == 2 * times.longer_s(P0.info, D1.info, 500)


@pytest.mark.parametrize(
    ("waited_s", "ago_s", "name"),
    [
        pytest.param({"p0d0": 0.004, "p0d1": 0.015}, 0.0, PolicyName.LEAST_WAIT, id="milliseconds are not noticed"),
        pytest.param({"p0d0": 0.004, "p0d1": 0.8}, 10 * HALVES_S, PolicyName.LEAST_WAIT, id="it was slow long ago"),
        pytest.param({"p0d0": 0.8, "p0d1": 0.004}, 0.0, PolicyName.ROUND_ROBIN, id="an operator's order is kept"),
    ],
)
def test_both_nodes_get_requests(waited_s: dict[str, float], ago_s: float, name: PolicyName) -> None:
    clock = Clock()
    times = known(clock, **waited_s)
    clock.now += ago_s
    chosen = {names(decide(times, P0, D0, D1, request=ask(turn=turn), name=name)) for turn in range(4)}
    assert chosen == {("p0", "d0"), ("p0", "d1")}


def test_a_wait_for_a_step_is_not_far() -> None:
    """It takes this long between any two machines, though only some were tried."""
    times = known(Clock(), p0d0=0.03)
    waits = at(node("p1", waiting_tokens=100), "10.0.1.1")
    assert names(decide(times, P0, waits, D0)) == ("p0", "d0")


def test_a_prompt_is_read_where_its_answer_is_written_if_that_is_far_from_the_prefill_node() -> None:
    quick = at(node("p0", rate=4000.0), "10.0.0.1")
    near = decide(known(Clock(), p1d0=0.004), quick, D0, local=LocalPrefill.AUTO)
    far = decide(known(Clock(), p1d0=0.004, p0d0=3.0), quick, D0, local=LocalPrefill.AUTO)
    assert (names(near), names(far)) == (("p0", "d0"), (None, "d0"))


def test_a_cached_prefix_is_not_left_for_a_pair_that_is_as_far() -> None:
    times = known(Clock(), p0d0=0.3, p1d0=0.3)
    waits = at(node("p0", waiting_tokens=1200), "10.0.0.1")
    request = ask(1000, cached={"p0": 500})
    assert names(decide(times, waits, P1, D0, request=request, name=PolicyName.PREFIX_AFFINITY)) == ("p0", "d0")


def test_no_kv_is_sent_where_it_arrived_wrong() -> None:
    times = known(Clock(), p1d0=0.8, p1d1=0.004)
    refuses = at(node("d0", left_out=["p0"]), "10.0.0.2")
    assert names(decide(times, P0, P1, refuses)) == ("p1", "d0")


def test_only_the_latest_pairs_are_remembered() -> None:
    times = PairTimes(Clock())
    times.observe(P1.info, D1.info, 500, 0.0)
    for number in range(MOST_PAIRS + 1):
        times.observe(at(P0, f"10.1.{number // 250}.{number % 250 + 1}").info, D0.info, 500, 0.5)
    assert times.longer_s(at(P0, "10.1.0.1").info, D0.info, 500) == 0.0
    assert times.longer_s(at(P0, "10.1.0.2").info, D0.info, 500) > 0.0
