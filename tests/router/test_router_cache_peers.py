"""Which peers a request names to its nodes: one that has more of its prompt, and one that mirrors what they keep."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from tandem.router.policy.choose import at_mirror, with_cache_peers
from tandem.router.policy.views import NodeView, RoutingDecision
from tandem.wire.nodes import NodeInfo, PeerAddress, Role
from tandem.wire.requests import CachePeers
from tests.router.conftest import StartRouter
from tests.router.test_router_policy import ask, names, node, pools


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
