from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import Unavailable
from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.policy.choose import expected_first_token_s, make_policy
from tandem.router.policy.views import NodeRates, NodeView, PoolSnapshot, RoutingDecision, RoutingRequest
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus


def node(
    node_id: str,
    *,
    rate: float | None = 1000.0,
    step: float | None = 0.01,
    pending_requests: int = 0,
    pending_tokens: int = 0,
    aggregated: bool = False,
    **status: Any,
) -> NodeView:
    role = Role.AGGREGATED if aggregated else Role.PREFILL if node_id.startswith("p") else Role.DECODE
    info = NodeInfo(node_id, role, 1, f"tcp://{node_id}", "", "fake", 4096, 16)
    fields: dict[str, Any] = {
        "free_blocks": 1000, "total_blocks": 1000, "running": 0, "waiting": 0, "waiting_tokens": 0, "transfers": 0,
        "held_blocks": 0, "step_age_s": 0.0, "counters": NodeCounters(),
    } | status  # fmt: skip
    return NodeView(
        info=info,
        status=NodeStatus(node_id, role, 1, NodeState.READY, **fields),
        rates=NodeRates(rate, step),
        pending_requests=pending_requests,
        pending_tokens=pending_tokens,
    )


def pools(*nodes: NodeView, handover: float | None = None) -> PoolSnapshot:
    return PoolSnapshot(
        prefill=tuple(n for n in nodes if n.info.role is Role.PREFILL),
        decode=tuple(n for n in nodes if n.info.role is not Role.PREFILL),
        handover_s=handover,
    )


def ask(tokens: int = 500, new: int = 100, **fields: Any) -> RoutingRequest:
    return RoutingRequest(prompt_tokens=tokens, max_new_tokens=new, **fields)


def decide(
    snapshot: PoolSnapshot,
    request: RoutingRequest | None = None,
    name: PolicyName = PolicyName.LEAST_WAIT,
    local: LocalPrefill = LocalPrefill.NEVER,
) -> RoutingDecision:
    return make_policy(name, local)(snapshot, request or ask())


def names(decision: RoutingDecision) -> tuple[str | None, str | None]:
    return (
        decision.prefill.node_id if decision.prefill else None,
        decision.decode.node_id if decision.decode else None,
    )


# --- least wait -----------------------------------------------------------------------------------------------


NEAR = ask(1000, cached={"p0": 900})


@pytest.mark.parametrize(
    ("nodes", "request_", "chosen"),
    [
        ([node("p0", waiting_tokens=3000), node("p1", waiting_tokens=100), node("d0")], ask(), ("p1", "d0")),
        ([node("p0", pending_tokens=3000), node("p1", waiting_tokens=100), node("d0")], ask(), ("p1", "d0")),
        ([node("p0", rate=1e4, waiting_tokens=3000), node("p1", rate=500, waiting_tokens=100), node("d0")], ask(), ("p0", "d0")),
        ([node("p0", waiting_tokens=500), node("p1"), node("d0")], NEAR, ("p0", "d0")),
        ([node("p0", waiting_tokens=2000), node("p1"), node("d0")], NEAR, ("p1", "d0")),
        ([node("d0", running=9), node("d1", running=2)], ask(), (None, "d1")),
        ([node("d0", running=3), node("d1", running=2, pending_requests=5)], ask(), (None, "d0")),
        ([node("d0", running=2, free_blocks=3), node("d1", running=4)], ask(), (None, "d1")),
        ([node("a0", aggregated=True), node("a1", aggregated=True)], ask(1000, cached={"a1": 900}), (None, "a1")),
    ],
    ids=[
        "the shorter queue of prompt tokens", "what was sent since the last status", "a faster node may have the longer queue",
        "a cached prefix is worth a little waiting", "and no more", "the emptier decode node", "with what was sent to it",
        "not one that is short of blocks", "an aggregated node with the prompt cached",
    ],
)  # fmt: skip
def test_the_least_wait(nodes: list[NodeView], request_: RoutingRequest, chosen: tuple[str | None, str]) -> None:
    assert names(decide(pools(*nodes), request_)) == chosen


def test_idle_nodes_take_turns() -> None:
    snapshot = pools(node("p0"), node("p1"), node("d0"), node("d1"), node("d2"))
    chosen = Counter(names(decide(snapshot, ask(turn=turn))) for turn in range(12))
    assert set(Counter(n for pair in chosen.elements() for n in pair).values()) == {4, 6}


@pytest.mark.parametrize(
    ("nodes", "request_", "seconds"),
    [
        ([node("p0", waiting_tokens=1500), node("d0")], ask(), 2.0),
        ([node("p0", pending_tokens=1500), node("d0")], ask(1000, cached={"p0": 500}, loading_s={"p0": 0.25}), 2.25),
        ([node("p0", rate=None), node("p1", rate=500, waiting_tokens=9000), node("d0")], ask(), 1.0),
        ([node("d0", rate=2000, waiting_tokens=1500)], ask(), 1.0),
        ([node("p0", rate=None), node("d0")], ask(), None),
    ],
    ids=["what waits, and the prompt", "without what is cached", "by another node's rate", "where there is one node", "of no rate"],
)  # fmt: skip
def test_the_first_token_is_expected_by_the_line_and_the_rate_of_the_node_that_reads(
    nodes: list[NodeView], request_: RoutingRequest, seconds: float | None
) -> None:
    snapshot = pools(*nodes)
    expected = expected_first_token_s(decide(snapshot, request_), snapshot, request_)
    assert expected == (pytest.approx(seconds) if seconds is not None else None)


# --- the others -----------------------------------------------------------------------------------------------


def test_round_robin_ignores_everything_else() -> None:
    snapshot = pools(node("p0", waiting_tokens=9999), node("p1"), node("d0", running=99), node("d1"))
    chosen = [names(decide(snapshot, ask(turn=turn), PolicyName.ROUND_ROBIN)) for turn in range(4)]
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


def test_prefix_affinity_waits_longer_for_a_cache_but_not_forever() -> None:
    request = ask(1000, cached={"p0": 200, "d1": 200})
    snapshot = pools(node("p0", waiting_tokens=500), node("p1"), node("d0"), node("d1", running=20))
    assert names(decide(snapshot, request, PolicyName.PREFIX_AFFINITY)) == ("p0", "d1")
    assert names(decide(snapshot, request, PolicyName.LEAST_WAIT)) == ("p1", "d0")
    busy = pools(node("p0", waiting_tokens=5000), node("p1"), node("d0"))
    decision = decide(busy, request, PolicyName.PREFIX_AFFINITY)
    assert names(decision)[0] == "p1"
    assert "too busy" in decision.reason


def test_a_session_stays_and_only_those_of_a_lost_node_move() -> None:
    nodes = [node(f"d{index}") for index in range(4)]

    def home(session: str, among: list[NodeView]) -> str | None:
        return names(decide(pools(*among), ask(session=session), PolicyName.SESSION_AFFINITY))[1]

    sessions = [f"s{index}" for index in range(40)]
    before = {session: home(session, nodes) for session in sessions}
    assert len(set(before.values())) == 4
    assert before == {session: home(session, nodes[::-1]) for session in sessions}
    after = {session: home(session, nodes[1:]) for session in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != "d0")


# --- what all have in common ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PolicyName))
def test_one_token_needs_no_decode_node(name: PolicyName) -> None:
    assert names(decide(pools(node("p0"), node("d0")), ask(new=1), name)) == ("p0", None)
    assert names(decide(pools(node("d0")), ask(new=1), name)) == (None, "d0")


@pytest.mark.parametrize("name", list(PolicyName))
def test_nobody_to_decode_is_unavailable(name: PolicyName) -> None:
    with pytest.raises(Unavailable):
        decide(pools(node("p0")), name=name)
    with pytest.raises(Unavailable):
        decide(pools(node("d0")), ask(avoid=frozenset({"d0"})), name)


def test_local_prefill_by_order() -> None:
    snapshot = pools(node("p0"), node("d0"), handover=0.0)
    assert names(decide(snapshot, local=LocalPrefill.ALWAYS)) == (None, "d0")
    assert names(decide(snapshot, local=LocalPrefill.NEVER)) == ("p0", "d0")
    assert names(decide(pools(node("d0")), local=LocalPrefill.NEVER)) == (None, "d0")


NODES = st.lists(
    st.builds(
        lambda i, p, w, r, rate: node(f"{'p' if p else 'd'}{i}", waiting_tokens=w, running=r, rate=rate),
        st.integers(0, 9),
        st.booleans(),
        st.integers(0, 10_000),
        st.integers(0, 300),
        st.none() | st.floats(1, 1e5),
    ),
    max_size=8,
    unique_by=lambda view: view.node_id,
)


@given(
    nodes=NODES,
    name=st.sampled_from(PolicyName),
    local=st.sampled_from(LocalPrefill),
    handover=st.none() | st.floats(0, 1),
    tokens=st.integers(1, 5000),
    new=st.integers(1, 500),
    turn=st.integers(0, 100),
    avoid=st.frozensets(st.sampled_from([f"{kind}{i}" for kind in "pd" for i in range(10)])),
)
def test_any_decision_is_one_that_can_be_carried_out(
    nodes: list[NodeView],
    name: PolicyName,
    local: LocalPrefill,
    handover: float | None,
    tokens: int,
    new: int,
    turn: int,
    avoid: frozenset[str],
) -> None:
    snapshot = pools(*nodes, handover=handover)
    request = ask(tokens, new, turn=turn, avoid=avoid, session="s")
    usable = {view.node_id for view in nodes} - avoid
    try:
        decision = decide(snapshot, request, name, local)
    except Unavailable:
        assert not any(node_id.startswith("d") for node_id in usable)
        assert new > 1 or not usable
        return
    assert decision.reason
    assert decision == decide(snapshot, request, name, local)  # pure
    prefill, decode = names(decision)
    assert {prefill, decode} - {None} <= usable
    if decode is None:
        assert new == 1
        assert prefill is not None
    assert prefill is None or prefill.startswith("p")
    assert decode is None or decode.startswith("d")


def test_a_decode_node_gets_nothing_from_a_prefill_node_that_it_leaves_out() -> None:
    nodes = (node("p0"), node("p1", waiting_tokens=5000), node("d0", left_out=["p0"]))
    assert (chosen := decide(pools(*nodes)).prefill) is not None
    assert chosen.node_id == "p1"
    alone = decide(pools(node("p0"), node("d0", left_out=["p0"])))
    assert alone.prefill is None
    assert "arrived wrong" in alone.reason


def test_a_request_of_a_model_with_states_takes_their_blocks_too() -> None:
    """However short it is. Where no layer attends, a request takes no more, however long it is."""
    busy = node("d", free_blocks=10, running=1)
    hybrid = msgspec.structs.replace(busy, info=msgspec.structs.replace(busy.info, state_blocks=8))
    assert busy.has_room(10 * 16)
    assert hybrid.has_room(2 * 16)
    assert not hybrid.has_room(2 * 16 + 1)
    assert hybrid.room_tokens == 2 * 16
    alone = msgspec.structs.replace(
        busy, info=msgspec.structs.replace(busy.info, state_blocks=1, keeps_tokens=False, max_model_len=4096)
    )
    assert alone.has_room(4000)
    assert alone.room_tokens == 4096
    full = msgspec.structs.replace(alone, status=msgspec.structs.replace(alone.status, wanted_blocks=10))
    assert not full.has_room(1)
    assert full.room_tokens == 0


def test_what_a_tier_has_to_load_counts_as_long_as_it_takes() -> None:
    cached = {"p0": 480, "p1": 240}
    nodes = pools(node("p0"), node("p1"), node("d0"))
    for seconds, chosen in ((0.0, "p0"), (0.1, "p0"), (1.0, "p1")):
        decision = decide(nodes, ask(tokens=500, cached=cached, loading_s={"p0": seconds}))
        assert decision.prefill is not None
        assert decision.prefill.node_id == chosen, seconds
