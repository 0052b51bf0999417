"""The shortlist holds the node that a policy would choose among all nodes, or one about as good."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.config import Heartbeat, LocalPrefill, PolicyName
from tandem.router.policy.choose import Chooser, make_policy
from tandem.router.policy.shortlist import Shortlist
from tandem.router.policy.views import (
    NodeRates,
    NodeView,
    PoolSnapshot,
    RoutingRequest,
    best_prefill_rate,
    decode_wait_s,
    prefill_costs_s,
)
from tandem.router.pool import NodePool
from tandem.router.prefixes import Overlaps, PrefixRecord, PromptHashes
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import CacheChange, CacheNews, TierStatus
from tests.router.test_router_pool import status

BLOCK = 16


def view(
    name: str, *, rate: float | None = None, step: float | None = None, pending: int = 0, **fields: Any
) -> NodeView:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}[name[0]]
    info = NodeInfo(name, role, 1, f"tcp://{name}", "", "m", 1 << 20, BLOCK)
    said = status(info, **{"free_blocks": 10**6, "total_blocks": 10**6, **fields})
    return NodeView(info, said, NodeRates(rate, step), pending, 100 * pending)


NOTHING = Overlaps(PrefixRecord().bits, {})  # that is cached


VIEWS = st.lists(
    st.builds(
        lambda kind, number, rate, running, waiting, pending, free: view(
            f"{kind}{number}",
            rate=rate,
            step=0.01,
            running=running,
            waiting_tokens=waiting,
            pending=pending,
            free_blocks=free,
        ),
        st.sampled_from("pda"),
        st.integers(0, 30),
        st.sampled_from([None, 1000.0, 4000.0]),
        st.integers(0, 50),
        st.integers(0, 20_000),
        st.integers(0, 3),
        st.integers(0, 2000),
    ),
    max_size=60,
)


def filed(views: list[NodeView]) -> tuple[Shortlist, dict[str, NodeView]]:
    """One view of each node, written with what each of `views` says of it, as the pool does."""
    shortlist, last = Shortlist(), dict[str, NodeView]()
    for each in views:
        there = last.setdefault(each.node_id, each)
        for field in ("status", "rates", "pending_requests", "pending_tokens", "pending_blocks"):
            setattr(there, field, getattr(each, field))
        shortlist.put(there)
    return shortlist, last


@given(VIEWS, st.data(), st.integers(1, 5000))
def test_what_is_filed_is_what_is_there(views: list[NodeView], data: st.DataObject, tokens: int) -> None:
    shortlist, last = filed(views)
    gone = data.draw(st.lists(st.sampled_from(sorted(last)), unique=True)) if last else []
    for name in gone:
        shortlist.drop(last.pop(name))
    everything = shortlist.every_node(None)
    seen = {each.node_id: each for each in (*everything.prefill, *everything.decode)}
    assert seen == last
    decode = [each for each in last.values() if each.info.role is not Role.PREFILL]
    assert shortlist.room.has_room(tokens, 0) == any(each.has_room(tokens) for each in decode)
    room = sum(each.room_tokens for each in decode)
    assert room == 0 or not shortlist.room.has_room(tokens, room)
    if room > tokens and any(each.has_room(tokens) for each in decode):
        assert shortlist.room.has_room(tokens, room - tokens)


@given(VIEWS, st.integers(1, 4000), st.integers(0, 7))
def test_the_least_wait_is_on_it(views: list[NodeView], tokens: int, turn: int) -> None:
    """Once every node's rate is measured, or while none is: one without is filed by a rate that it may not have."""
    measured = any(each.rates.prefill_tokens_per_s for each in views)
    views = [
        msgspec.structs.replace(
            each,
            status=msgspec.structs.replace(each.status, free_blocks=10**6),
            rates=NodeRates(each.rates.prefill_tokens_per_s or 1000.0 if measured else None, each.rates.step_s),
        )
        for each in views
    ]
    shortlist, last = filed(views)
    request = RoutingRequest(tokens, 100, turn=turn)
    few = shortlist.of(PolicyName.LEAST_WAIT, request, NOTHING, None)
    for pool in (Role.PREFILL, Role.DECODE):
        among_all = [each for each in last.values() if (each.info.role is Role.PREFILL) == (pool is Role.PREFILL)]
        listed = few.prefill if pool is Role.PREFILL else few.decode
        if not among_all:
            assert not listed
            continue
        assumed = best_prefill_rate(among_all)
        least_among_all, least_listed = (
            min(
                prefill_costs_s(nodes, request, assumed)
                if pool is Role.PREFILL
                else [decode_wait_s(each, request, assumed) for each in nodes]
            )
            for nodes in (among_all, listed)
        )
        assert least_listed <= 1.1 * least_among_all + 0.001


@given(VIEWS, st.sampled_from([PolicyName.SESSION_AFFINITY, PolicyName.ROUND_ROBIN]), st.text(max_size=3), st.integers(0, 99))  # fmt: skip
def test_sessions_and_turns_go_where_they_would_among_all(
    views: list[NodeView], name: PolicyName, session: str, turn: int
) -> None:
    shortlist, _ = filed([*views, view("p0"), view("d0")])
    request = RoutingRequest(100, 100, session=session, turn=turn)
    policy = make_policy(name, LocalPrefill.NEVER)
    assert policy(shortlist.of(name, request, NOTHING, None), request) == policy(shortlist.every_node(None), request)


def test_slower_nodes_are_on_it_unless_faster_ones_have_nothing_to_do() -> None:
    def listed(cached: Overlaps, **of_the_fast: Any) -> set[str]:
        fast = [view(f"p{i}", rate=9000.0, **of_the_fast) for i in range(6)]
        slow = [view(f"p{i}", rate=1000.0) for i in range(10, 16)]
        shortlist, _ = filed([*fast, *slow, view("p20")])
        few = shortlist.of(PolicyName.LEAST_WAIT, RoutingRequest(1600, 10), cached, None)
        return {each.node_id for each in few.prefill} - {"p20"}  # which was not measured: it may be as fast

    first_fast, first_slow = {f"p{i}" for i in range(5)}, {f"p{i}" for i in range(10, 15)}
    assert listed(NOTHING) == first_fast
    assert listed(NOTHING, waiting_tokens=500) == first_fast | first_slow
    record, hashes = PrefixRecord(), PromptHashes(list(range(1600)), None).of(BLOCK)
    record.sent("p11", hashes)
    assert listed(Overlaps(record.bits, {BLOCK: [record.levels(hashes)]})) == {*first_fast, "p11"}


def test_a_node_with_room_is_on_it_however_busy_it_is() -> None:
    nodes = [view(f"d{i}", free_blocks=1, running=1, step=0.01) for i in range(40)]
    shortlist, _ = filed([*nodes, view("d99", running=30, step=0.01)])
    few = shortlist.of(PolicyName.LEAST_WAIT, RoutingRequest(1000, 10), NOTHING, None)
    assert "d99" in {each.node_id for each in few.decode}


def test_where_kv_arrived_wrong_every_prefill_node_is_ranked() -> None:
    shortlist, _ = filed([*(view(f"p{i}") for i in range(40)), view("d0", left_out=[f"p{i}" for i in range(39)])])
    few = shortlist.of(PolicyName.LEAST_WAIT, RoutingRequest(1000, 10), NOTHING, None)
    decision = make_policy(PolicyName.LEAST_WAIT, LocalPrefill.NEVER)(few, RoutingRequest(1000, 10))
    assert decision.prefill is not None
    assert decision.prefill.node_id == "p39"


@given(st.integers(0, 1000), st.integers(1, 60))
def test_nodes_that_have_most_of_the_prompt_are_on_it(seed: int, holders: int) -> None:
    """However many have it, one of those with the least to do is among them."""
    rng = random.Random(seed)
    nodes = [view(f"p{i}", rate=1000.0, waiting_tokens=rng.randint(2000, 9000)) for i in range(60)]
    shortlist, last = filed(nodes)
    record, hashes = PrefixRecord(), PromptHashes(list(range(1600)), None)
    for each in rng.sample(nodes, holders):
        record.sent(each.node_id, hashes.of(BLOCK))
    overlaps = Overlaps(record.bits, {BLOCK: [record.levels(hashes.of(BLOCK))]})
    few = shortlist.of(PolicyName.LEAST_WAIT, RoutingRequest(1600, 10), overlaps, None)
    cached = {name: overlaps.tokens(each.info) for name, each in last.items()}
    request = RoutingRequest(1600, 10, cached=cached)
    best = min(prefill_costs_s(nodes, request, 1000.0))
    assert min(prefill_costs_s(few.prefill, request, 1000.0)) <= 1.1 * best + 0.5


class EveryNode(Chooser):
    def candidates(self, request: RoutingRequest, overlaps: Overlaps) -> PoolSnapshot:
        return self._pool.view.snapshot()


def test_a_session_of_requests_ends_up_where_it_would_among_all() -> None:
    """Two choosers over the same pool, one of them with the shortlist: later turns of a chat find what the first one left."""
    for kind in (Chooser, EveryNode):
        pool = NodePool("m", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None)
        views = [view(f"p{i}") for i in range(50)] + [view(f"d{i}") for i in range(50)]
        pool.set_members([each.info for each in views])
        for each in views:
            pool.on_status(each.status)
        chooser = kind(pool, PolicyName.LEAST_WAIT, LocalPrefill.NEVER)
        history, nodes = list(range(1000)), set()
        for _ in range(4):
            decision = chooser.choose(RoutingRequest(len(history), 10), PromptHashes(history, None))
            assert decision.prefill is not None
            nodes.add(decision.prefill.node_id)
            history += range(100)
        assert len(nodes) == 1


def test_loading_from_a_tier_is_expected_to_take_what_it_took() -> None:
    pool = NodePool("m", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None)
    tier = TierStatus("cpu", 1, 2, 0, 0, 0, 0, 0, loaded_tokens=1000, loading_seconds=0.5)
    views = [view("p0", tiers=[tier]), view("p1"), view("d0")]
    pool.set_members([each.info for each in views])
    for each in views:
        pool.on_status(each.status)
    chooser = Chooser(pool, PolicyName.LEAST_WAIT, LocalPrefill.NEVER, 1000)
    hashes = PromptHashes(list(range(320)), None)
    packed = array("Q", hashes.of(BLOCK)).tobytes()
    for number, changes in enumerate(([], [CacheChange("GPU", True, packed[:40]), CacheChange("CPU", True, packed)])):
        assert chooser.on_cache_news(CacheNews("p0", 1, number, changes))
    _, request = chooser._known(RoutingRequest(321, 10), "", hashes)
    assert request.cached == {"p0": 320}
    assert request.loading_s == {"p0": pytest.approx((320 - 5 * BLOCK) * 0.5 / 1000)}
