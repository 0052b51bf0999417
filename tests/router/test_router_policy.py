from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import Unavailable
from tandem.router.config import LocalPrefill, PolicyName
from tandem.router.policy.choose import at_mirror, expected_first_token_s, make_policy, with_cache_peers
from tandem.router.policy.views import NodeRates, NodeView, PoolSnapshot, RoutingDecision, RoutingRequest
from tandem.router.prefixes import MARKED_PLACES, PrefixRecord, PromptHashes
from tandem.wire.nodes import NodeInfo, PeerAddress, Role
from tandem.wire.requests import CachePeers
from tests.router.conftest import StartRouter
from tests.router.test_router_pool import status


def node(
    node_id: str,
    *,
    rate: float | None = 1000.0,
    step: float | None = 0.01,
    pending_requests: int = 0,
    pending_tokens: int = 0,
    aggregated: bool = False,
    **fields: Any,
) -> NodeView:
    role = Role.AGGREGATED if aggregated else Role.PREFILL if node_id.startswith("p") else Role.DECODE
    info = NodeInfo(node_id, role, 1, f"tcp://{node_id}", "", "fake", 4096, 16)
    said = status(info, **{"free_blocks": 1000, "total_blocks": 1000, **fields})
    return NodeView(info, said, NodeRates(rate, step), pending_requests, pending_tokens)


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


@pytest.mark.parametrize(("local", "prefill"), [(LocalPrefill.ALWAYS, None), (LocalPrefill.NEVER, "p0")])
def test_local_prefill_by_order(local: LocalPrefill, prefill: str | None) -> None:
    assert names(decide(pools(node("p0"), node("d0"), handover=0.0), local=local)) == (prefill, "d0")


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


def goes_local(snapshot: PoolSnapshot, tokens: int, **request: object) -> bool:
    return names(decide(snapshot, ask(tokens, **request), local=LocalPrefill.AUTO))[0] is None


def one_of_each(handover: float | None, decode: dict[str, Any], **prefill: Any) -> PoolSnapshot:
    return pools(node("p0", **prefill), node("d0", **decode), handover=handover)


BUSY = {"running": 1}


@pytest.mark.parametrize(
    ("away", "local"),
    [
        ((one_of_each(0.05, BUSY), 400), (one_of_each(0.05, BUSY), 40)),
        ((one_of_each(0.001, BUSY), 40), (one_of_each(0.2, BUSY), 40)),
        ((one_of_each(0.05, {"running": 30}), 40), (one_of_each(0.05, BUSY), 40)),
        ((one_of_each(0.01, {"running": 2}), 40), (one_of_each(0.01, {"running": 2}, waiting_tokens=5000), 40)),
        ((one_of_each(0.02, {"running": 3}), 2000), (one_of_each(0.02, {"running": 3}), 2000, {"d0": 1990})),
        ((one_of_each(0.05, BUSY | {"rate": 100}, rate=1e4), 100), (one_of_each(0.05, BUSY | {"rate": None}, rate=1e4), 100)),
    ],
    ids=["the prompt", "the handover", "streams that would stall", "the prefill node's queue", "what is cached", "its own rate, or its peers'"],
)  # fmt: skip
def test_the_line_moves_with(away: tuple[PoolSnapshot, int], local: tuple[Any, ...]) -> None:
    assert not goes_local(*away)
    assert goes_local(local[0], local[1], cached=local[2] if local[2:] else {})


def test_until_everything_is_measured_prompts_are_sent_away() -> None:
    assert not goes_local(one_of_each(None, {}), 5)
    assert not goes_local(one_of_each(0.01, {"rate": None}, rate=None), 5)


def test_no_line_is_so_long_that_streams_stand_still_for_a_prompt() -> None:
    crowded = node("p0", waiting_tokens=50_000)
    assert goes_local(pools(crowded, node("d0"), handover=0.01), 500)  # no request is being decoded
    assert not goes_local(pools(crowded, node("d0", running=1), handover=0.01), 500)
    assert not goes_local(pools(crowded, node("d0", waiting=1), handover=0.01), 500)
    assert goes_local(pools(crowded, node("d0", running=1, rate=100_000), handover=0.01), 500)


def test_the_decision_says_what_it_compared() -> None:
    decision = decide(pools(node("p0"), node("d0"), handover=0.05), ask(40), local=LocalPrefill.AUTO)
    assert "40 uncached tokens cost 40 ms here and 90 ms sent to p0" in decision.reason


def block_hashes(tokens: list[int], size: int, salt: str | None) -> list[int]:
    return PromptHashes(tokens, salt).of(size)


def overlap(record: PrefixRecord, node_id: str, hashes: list[int]) -> int:
    """How many leading blocks the node likely has cached."""
    bit = record.bits.of(node_id)
    return next((blocks for blocks, nodes in record.levels(hashes) if nodes & bit), 0)


TOKENS = st.lists(st.integers(0, 3), max_size=40)


def common_blocks(left: list[int], right: list[int], size: int) -> int:
    count = 0
    while (count + 1) * size <= min(len(left), len(right)) and left[: (count + 1) * size] == right[
        : (count + 1) * size
    ]:
        count += 1
    return count


@given(sent=st.lists(TOKENS, max_size=4), prompt=TOKENS, size=st.sampled_from([1, 2, 4]))
def test_overlap_is_the_longest_common_prefix_as_far_as_it_is_marked(
    sent: list[list[int]], prompt: list[int], size: int
) -> None:
    record = PrefixRecord()
    for tokens in sent:
        record.sent("n", block_hashes(tokens, size, None))
    common = max((common_blocks(tokens, prompt, size) for tokens in sent), default=0)
    found = overlap(record, "n", block_hashes(prompt, size, None))
    assert found == max((place for place in MARKED_PLACES if place <= common), default=0)
    assert found >= common * 7 / 8


def test_nodes_and_salts_are_apart() -> None:
    record = PrefixRecord()
    record.sent("n", block_hashes([1, 2, 3, 4], 2, "salt"))
    assert overlap(record, "n", block_hashes([1, 2, 3, 4], 2, "salt")) == 2
    assert overlap(record, "n", block_hashes([1, 2, 3, 4], 2, None)) == 0
    assert overlap(record, "m", block_hashes([1, 2, 3, 4], 2, "salt")) == 0


def test_it_holds_as_much_as_the_node_and_forgets_the_longest_unused() -> None:
    record = PrefixRecord()
    record.set_capacity("n", 2)
    first, second = block_hashes([1, 1, 1], 1, None), block_hashes([2], 1, None)
    record.sent("n", first[:2])
    record.sent("n", second)
    assert overlap(record, "n", second) == 1
    assert overlap(record, "n", first) == 1  # of a prompt the last block goes first, as in a node's cache
    record.forget("n")
    assert overlap(record, "n", second) == 0


@given(prompt=TOKENS, output=TOKENS, size=st.sampled_from([1, 2, 4]))
def test_hashes_that_are_known_are_gone_on_from(prompt: list[int], output: list[int], size: int) -> None:
    hashes = PromptHashes(prompt, "salt")
    assert hashes.of(size) == block_hashes(prompt, size, "salt")
    assert hashes.with_output(size, output) == block_hashes(prompt + output, size, "salt")


def sharing(node_id: str, *, mirrors: bool = True, aggregated: bool = False) -> NodeView:
    view = node(node_id, aggregated=aggregated)
    info = msgspec.structs.replace(view.info, tier_endpoint=f"tier://{node_id}", mirrors=mirrors)
    return msgspec.structs.replace(view, info=info)


def named(
    prefill: NodeInfo | None, decode: NodeInfo, *views: NodeView, cached: Mapping[str, int] | None = None
) -> RoutingDecision:
    """The peers that a request names to its nodes, out of these."""
    pool = pools(*views)
    by_name = {view.node_id: view for view in pool.decode}
    return with_cache_peers(RoutingDecision(prefill, decode, ""), pool, cached or {}, by_name, sorted(by_name))


P0, P1, D0, D1, D2 = (sharing(name) for name in ("p0", "p1", "d0", "d1", "d2"))


@pytest.mark.parametrize(
    ("cached", "source"),
    [
        ({"p1": 64}, "p1"),
        ({"d1": 64}, "d1"),  # what was decoded there
        ({"p1": 64, "p0": 64}, None),
        ({"p1": 64, "p0": 63}, None),  # less than a block more
        ({}, None),
    ],
)
def test_the_node_that_reads_the_prompt_is_told_who_has_more_of_it(
    cached: Mapping[str, int], source: str | None
) -> None:
    decision = named(P0.info, D0.info, P0, P1, D0, D1, cached=cached)
    assert (decision.source.node_id if decision.source else None) == source


def test_nodes_that_share_nothing_are_not_named() -> None:
    alone = node("d0")
    decision = named(None, alone.info, P0, alone, D1, cached={"p0": 64, "d1": 64})
    assert (decision.source, decision.mirror) == (None, None)


def test_each_decode_node_has_one_mirror_and_none_is_its_own() -> None:
    def mirror_of(*views: NodeView) -> str | None:
        found = named(None, views[0].info, *views).mirror
        return found.node_id if found else None

    assert mirror_of(D0, D1, D2, P0) == "d1"
    assert mirror_of(D1, D2, D0) == "d2"
    assert mirror_of(D2, D0, D1) == "d0"
    assert mirror_of(D0, sharing("d1", mirrors=False), P0) is None


def test_a_request_whose_node_is_gone_goes_to_its_mirror() -> None:
    views = {"d1": D1, "d2": D2}
    decision = at_mirror(ask(mirror=D2.info, avoid=frozenset({"d0"})), views)
    assert decision is not None
    assert names(decision) == (None, "d2"), "it needs no prefill node"
    assert at_mirror(ask(), views) is None
    assert at_mirror(ask(mirror=D2.info), {"d1": D1}) is None, "it is gone as well"
    assert at_mirror(ask(mirror=D2.info, avoid=frozenset({"d2"})), views) is None, "it failed the request itself"
    again = msgspec.structs.replace(D2, info=msgspec.structs.replace(D2.info, epoch=2))
    assert at_mirror(ask(mirror=D2.info), {"d1": D1, "d2": again}) is None, "it was started again, and has nothing"


def test_a_stream_goes_on_at_the_mirror(start_router: StartRouter) -> None:
    router = start_router(prefill=1, decode=0)
    decode = {name: router.add(name, Role.DECODE, mirrors=True) for name in ("d0", "d1", "d2")}
    router.wait_for(lambda: router.in_view() >= set(decode), "all nodes")
    for each in decode.values():
        each.set(pause_at=5)
    with router.stream(max_tokens=12, seed=9) as events:
        text = events.text(count=5)
        lost = max(decode.values(), key=lambda each: len(each.running))
        ring = sorted(decode)
        mirror = decode[ring[(ring.index(lost.info.node_id) + 1) % 3]]
        (first,) = lost.submits
        there = PeerAddress(mirror.info.node_id, mirror.info.epoch, mirror.info.tier_endpoint)
        assert first.cache_peers == CachePeers(mirror=there)
        mirror.resume()
        router.remove(lost.info.node_id).kill()
        rest = events.rest()
    assert rest.pop() == "[DONE]"
    text += "".join(body["choices"][0]["text"] for body in rest)
    assert text == router.expected("the fox", 12, seed=9)
    (moved,) = mirror.submits
    assert moved.transfer is None
    assert len(moved.output_token_ids) == 5
    assert moved.cache_peers is not None
    assert moved.cache_peers.mirror is not None, "it has one of its own from now on"
