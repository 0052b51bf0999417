"""Adapters are replaced node by node, and each router knows their names all the time: in routers that saw all of it, in one that has just
started, while nodes join and die, and while the next replacement begins. What a router serves, the nodes have: the real book of a node
answers."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.model.adapters import Adapter
from tandem.router.config import Heartbeat
from tandem.router.pool import NodePool
from tandem.wire.adapters import identity_of
from tandem.wire.nodes import NodeInfo, Role
from tests.adapter_books import PlainBook
from tests.router.test_router_pool import info, status


class Node:
    """Its book, and what it says of it."""

    def __init__(self, node: NodeInfo, *versions: str, joined_with: int | None = None) -> None:
        self.info = node
        self.joined_with = joined_with  # None: it was there from the beginning
        self.book = PlainBook()
        for version in versions:
            self.take(version)

    def take(self, version: str | None) -> None:
        """None: it unloads the adapter."""
        self.book.serve([Adapter("law", version, {})] if version is not None else [])
        self.book.forget_others(set(), 0.0)

    def has(self, version: str) -> bool:
        return self.book.has(identity_of("law", version))

    def tell(self, pool: NodePool) -> None:
        pool.on_status(status(self.info, adapters=self.book.served, replaced_adapters=self.book.replaced))


def router(*nodes: Node) -> NodePool:
    pool = NodePool("fake", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None)
    pool.set_members([node.info for node in nodes])
    for node in nodes:
        node.tell(pool)
    return pool


def served(pool: NodePool) -> str | None:
    return pool.view.adapters().get("law")


def pair(*versions: str) -> tuple[Node, Node]:
    return Node(info("p0", role=Role.PREFILL), *versions), Node(info("d0"), *versions)


def test_a_node_that_joins_with_the_earlier_weights_takes_nobody_back() -> None:
    prefill, decode = pair("old")
    pool = router(prefill, decode)
    for node in (prefill, decode):
        node.take("new")
        node.tell(pool)
    assert served(pool) == "new"
    late = Node(info("d1"), "old")
    pool.set_members([prefill.info, decode.info, late.info])
    late.tell(pool)
    assert served(pool) == "new"
    assert served(router(prefill, decode, late)) == "old", "what all have: a router cannot know more"
    bare = Node(info("d2"))
    pool.set_members([prefill.info, decode.info, late.info, bare.info])
    bare.tell(pool)
    assert served(pool) == "new"


def test_a_node_that_dies_in_the_middle_is_waited_for_no_longer() -> None:
    prefill, decode = pair("old")
    pool = router(prefill, decode)
    prefill.take("new")
    prefill.tell(pool)
    pool.suspect("d0", 1, "it died")
    assert served(pool) == "new"


def test_a_node_that_never_gets_the_new_weights_leaves_the_earlier_ones_served() -> None:
    prefill, decode = pair("old")
    pool = router(prefill, decode)
    prefill.take("new")
    prefill.tell(pool)
    assert served(pool) == "old"
    prefill.take("old")  # the change is undone
    prefill.tell(pool)
    assert served(pool) == served(router(prefill, decode)) == "old"


def test_nodes_that_have_nothing_in_common_serve_what_some_have() -> None:
    """Their machines had no memory for what was replaced."""
    prefill, decode = pair("old")
    pool = router(prefill, decode)
    assert served(pool) == "old"
    prefill = Node(prefill.info, "new")
    prefill.tell(pool)
    assert served(pool) == "old"
    assert served(router(prefill, decode)) in ("old", "new")


def test_an_unloaded_adapter_is_unknown_at_the_first_nodes_word() -> None:
    prefill, decode = pair("one", "two")
    pool = router(prefill, decode)
    prefill.take(None)
    assert not prefill.has("one")
    prefill.tell(pool)
    assert served(pool) is None
    assert served(router(prefill, decode)) is None
    prefill.take("two")  # it could not be unloaded everywhere, and is taken back
    prefill.tell(pool)
    assert served(pool) == "two"


class Replacing(RuleBasedStateMachine):
    """A controller replaces the adapter again and again, each time on one node after another, with nodes that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.newest = 0  # the version that a node gets before it is announced; the one being given out
        self.nodes = [Node(info("p0", role=Role.PREFILL), "0"), Node(info("d0"), "0")]
        self.came = 0
        self.routers = [router(*self.nodes), router(*self.nodes)]
        self.shown: list[int] = [0, 0]

    @property
    def lacking(self) -> list[Node]:
        return [node for node in self.nodes if node.book.served["law"] != str(self.newest)]

    @precondition(lambda self: self.newest < self.recorded + 3)
    @rule()
    def begin(self) -> None:
        self.newest += 1

    @precondition(lambda self: self.lacking)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.lacking))
        node.take(str(self.newest))
        for pool in self.routers:
            node.tell(pool)
        if not self.lacking:
            self.recorded = self.newest

    @rule()
    def join(self) -> None:
        self.came += 1
        node = Node(info(f"d{self.came}"), str(self.recorded), joined_with=self.recorded)
        self.nodes.append(node)
        self.members_changed()
        for pool in self.routers:
            node.tell(pool)

    @precondition(lambda self: len(self.nodes) > 2)
    @rule()
    def die(self) -> None:
        self.nodes.pop(1)
        self.members_changed()
        if not self.lacking:
            self.recorded = self.newest

    def members_changed(self) -> None:
        for pool in self.routers:
            pool.set_members([node.info for node in self.nodes])

    @rule()
    def a_router_restarts(self) -> None:
        self.routers[1] = router(*self.nodes)
        self.shown[1] = 0

    @invariant()
    def every_router_serves_what_nodes_have(self) -> None:
        for place, pool in enumerate(self.routers):
            version = served(pool)
            assert version is not None, "the name is unknown"
            lacking = [node for node in self.nodes if not node.has(version)]
            assert len(lacking) < len(self.nodes)
            assert all(node.joined_with is not None and node.joined_with < int(version) for node in lacking), (
                "only a node that joined with earlier weights may lack it"
            )
            assert int(version) >= self.shown[place], "it went back"
            self.shown[place] = int(version)
            if not self.lacking:
                assert version == str(self.newest)


TestReplacing = Replacing.TestCase
TestReplacing.settings = settings(max_examples=50)  # half of the usual: each begins with two routers
