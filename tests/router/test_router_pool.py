from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import Unavailable
from tandem.router.config import Heartbeat, LocalPrefill, PolicyName
from tandem.router.policy.choose import Chooser
from tandem.router.policy.views import RoutingRequest
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.wire.listening import Listener
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus
from tandem.wire.versions import REACH, WIRE_VERSION


class World:
    """A pool on a clock that tests set. `there`: members that have spoken."""

    def __init__(self, *there: NodeInfo) -> None:
        self.now = 1000.0
        self.lost: list[tuple[str, int, str]] = []
        self.listeners: dict[str, Listener] = {}  # what a machine's kernel does with a connection, by node
        self.pool = NodePool(
            "fake",
            Heartbeat(),
            lambda: self.now,
            lambda node, why: self.lost.append((node.node_id, node.epoch, why)),
            lambda: None,
            listener=lambda endpoint: self.listeners.get(
                endpoint.removeprefix("tcp://").removesuffix(":1"), Listener.UNKNOWN
            ),
        )
        if there:
            self.pool.set_members(list(there))
        for node in there:
            self.say(node)

    def say(self, info: NodeInfo, **fields: Any) -> None:
        self.pool.on_status(status(info, **fields))

    def pass_time(self, seconds: float) -> None:
        """As the heartbeat does: looking three times between two pings."""
        until = self.now + seconds
        while self.now < until:
            self.now += Heartbeat().ping_interval / 3
            self.pool.check_silence()

    @property
    def in_view(self) -> set[str]:
        snapshot = self.pool.view.snapshot()
        return {view.node_id for view in (*snapshot.prefill, *snapshot.decode)}


def info(node_id: str, epoch: int = 1, role: Role = Role.DECODE, model: str = "fake") -> NodeInfo:
    return NodeInfo(node_id, role, epoch, f"tcp://{node_id}:1", "", model, 2048, 16)


def status(node: NodeInfo, **fields: Any) -> NodeStatus:
    base: dict[str, Any] = {
        "state": NodeState.READY, "free_blocks": 5, "total_blocks": 9, "running": 0, "waiting": 0, "waiting_tokens": 0,
        "transfers": 0, "held_blocks": 0, "step_age_s": 0.0, "counters": NodeCounters(),
    } | fields  # fmt: skip
    return NodeStatus(node_id=node.node_id, role=node.role, epoch=node.epoch, **base)


P0 = info("p0", role=Role.PREFILL)
D0, D1 = info("d0"), info("d1")


def test_a_member_is_in_view_once_it_has_spoken() -> None:
    world = World()
    assert world.pool.set_members([D0]) == ([D0], [])
    world.pass_time(10)
    assert (world.in_view, world.lost) == (set(), []), "no router had sent it anything"
    world.say(D0)
    assert world.in_view == {"d0"}
    assert world.pool.set_members([P0, D0]) == ([P0], [])
    world.say(P0)
    assert world.pool.set_members([D0, P0]) == ([], []), "the same membership changes nothing"
    assert (world.in_view, world.lost) == ({"d0", "p0"}, [])


def test_counters_are_kept_until_a_status_has_newer_ones() -> None:
    world = World(D0)
    world.say(D0, counters=NodeCounters(steps=5))
    counted_at = world.now
    world.now += 0.25
    world.say(D0, counters=None, running=2)
    member = world.pool.member("d0")
    assert member is not None
    assert (member.status.running, member.counters.steps, member.counters_at) == (2, 5, counted_at)
    world.say(D0, counters=NodeCounters(steps=7))
    assert (member.counters.steps, member.counters_at) == (7, world.now)


def test_silence_loses_a_node_once_and_a_word_brings_it_back() -> None:
    world = World(D0)
    world.pass_time(2)
    assert world.in_view == {"d0"}
    world.pass_time(0.8)  # however it froze, it is out of view within three seconds
    assert [(name, epoch, "silent" in why) for name, epoch, why in world.lost] == [("d0", 1, True)]
    assert world.in_view == set()
    world.pass_time(5)
    assert len(world.lost) == 1
    world.say(D0)
    assert world.in_view == {"d0"}
    for _ in range(5):
        world.pass_time(2)
        assert world.pool.heard("d0", 1), "tokens are a sign of life"
    assert world.in_view == {"d0"}


def test_a_starved_node_that_none_could_replace_is_out_of_view_and_not_lost() -> None:
    """Its process gets no time, and its machine answers for it: what it has waits there."""
    world = World(P0, D0)
    world.listeners["p0"] = Listener.ACCEPTS
    for _ in range(4):
        world.say(D0)
        world.pass_time(2)
    assert (world.lost, world.in_view) == ([], {"d0"})
    why = "it is silent while its machine answers: it gets no time to run"
    assert world.pool.unusable(world.pool.members[0]) == why
    world.say(P0)
    assert world.in_view == {"p0", "d0"}
    for _ in range(6):
        world.say(D0)
        world.pass_time(2)
    assert [name for name, _, _ in world.lost] == ["p0"], "not for ever"


@pytest.mark.parametrize("listener", [Listener.UNKNOWN, Listener.REFUSES, Listener.DOES_NOT_ANSWER])
def test_a_silent_node_whose_machine_does_not_answer_for_it_is_lost(listener: Listener) -> None:
    world = World(D0)
    world.listeners["d0"] = listener
    world.pass_time(2.8)
    assert len(world.lost) == 1


def test_a_starved_node_is_left_as_soon_as_another_can_take_its_requests() -> None:
    """Its requests would have to wait for it, and need not."""
    world = World()
    world.pool.set_members([D0, D1])
    world.listeners |= {"d0": Listener.ACCEPTS, "d1": Listener.ACCEPTS}
    world.say(D0)
    world.pass_time(4)
    assert world.lost == []
    world.say(D1)
    world.pass_time(0.3)
    assert [name for name, _, _ in world.lost] == ["d0"]


def test_a_prefill_node_whose_kv_arrives_wrong_at_two_nodes_gets_nothing_new() -> None:
    """At one it may be that node's own network card."""
    world = World(P0, D0, D1)
    world.say(D0, left_out=["p0"])
    assert world.in_view == {"p0", "d0", "d1"}
    world.say(D1, left_out=["p0"])
    assert world.in_view == {"d0", "d1"}
    assert world.pool.unusable(world.pool.members[0]) == "its KV arrived wrong at d0, d1"
    world.say(D0)
    assert world.in_view == {"p0", "d0", "d1"}


def test_nodes_that_left_accuse_nobody() -> None:
    """Two decode nodes are replaced, as an operator does who looks for the broken part. Their successors have no complaint."""
    world = World()
    prefill, decode = info("p0", role=Role.PREFILL), [info("d0"), info("d1")]
    world.pool.set_members([prefill, *decode])
    for node in (prefill, *decode):
        world.say(node, left_out=["p0"] if node in decode else [])
    assert world.in_view == {"d0", "d1"}
    after = [info("d0", 2), info("d1", 2)]
    world.pool.set_members([prefill, *after])
    for node in after:
        world.say(node)
    assert world.in_view == {"p0", "d0", "d1"}


def test_a_router_that_was_away_blames_nobody() -> None:
    world = World(D0)
    world.pass_time(1)
    world.now += 60
    world.pool.check_silence()
    assert world.lost == []
    world.pass_time(4)
    assert len(world.lost) == 1


def test_leaving_and_coming_back_with_another_epoch() -> None:
    world, new = World(D0), info("d0", 2)
    assert world.pool.set_members([new]) == ([new], [D0])
    assert [(name, epoch) for name, epoch, _ in world.lost] == [("d0", 1)]
    world.say(D0)
    assert (world.in_view, world.pool.foreign_messages) == (set(), 1)
    world.say(new)
    assert world.in_view == {"d0"}
    world.say(info("x0"))  # a stranger
    assert not world.pool.heard("x0", 1)
    assert (world.in_view, world.pool.foreign_messages) == ({"d0"}, 3)


def test_only_ready_nodes_get_requests_but_others_keep_theirs() -> None:
    for state in (NodeState.STARTING, NodeState.DRAINING):
        world = World(D0)
        world.say(D0, state=state)
        assert (world.in_view, world.lost) == (set(), [])
    assert World(info("d0", model="other")).in_view == set(), "another model is never in view"


def test_a_node_that_failed_or_is_suspected_is_lost_once_until_it_speaks() -> None:
    world = World(D0)
    for _ in range(3):
        world.say(D0, state=NodeState.FAILED, detail="out of memory")
    assert len(world.lost) == 1
    assert "out of memory" in world.lost[0][2]
    world.say(D0)
    assert world.in_view == {"d0"}
    world.pool.suspect("d0", 99, "of another epoch")
    assert len(world.lost) == 1
    for _ in range(2):
        world.pool.suspect("d0", 1, "its queue is full")
    assert (len(world.lost), world.in_view) == (2, set())


def test_what_was_sent_counts_until_a_status_shows_it() -> None:
    world = World(P0)
    (view,) = world.pool.view.snapshot().prefill
    world.pool.sent("p0", "r1", 100)
    world.pool.sent("p0", "r2", 50)
    assert (view.pending_requests, view.pending_tokens) == (2, 150)
    world.pool.answered("p0", "r1")
    assert view.pending_tokens == 50
    world.say(P0)  # written before it can have read them
    assert view.pending_tokens == 50
    world.now += 0.2
    world.say(P0)
    assert view.pending_tokens == 0


def test_a_snapshot_is_one_value_until_nodes_come_or_go_and_its_views_are_as_the_nodes_are() -> None:
    world = World(D0)
    first = world.pool.view.snapshot()
    world.pool.sent("d0", "r", 1)
    world.say(D0, running=3)
    assert world.pool.view.snapshot() is first
    assert (first.decode[0].pending_requests, first.decode[0].status.running) == (1, 3)
    world.say(D0, state=NodeState.DRAINING)
    assert world.pool.view.snapshot().decode == ()


def test_the_context_is_the_shortest_of_those_in_view() -> None:
    world, short = World(), msgspec.structs.replace(P0, max_model_len=512)
    assert world.pool.view.max_model_len() is None
    world.pool.set_members([D0, short])
    for node, context in ((D0, 2048), (short, 512)):
        world.say(node)
        assert world.pool.view.max_model_len() == context


def test_each_request_runs_on_nodes_of_one_content() -> None:
    """Which contents there are, the controller decides: two, while one takes the other's place."""
    contents = {"d0": "x", "d1": "x", "p0": "x", "d2": "y", "p1": "y", "p2": "z"}  # nothing could decode what p2 reads
    nodes = [
        msgspec.structs.replace(info(name, role=Role.PREFILL if name[0] == "p" else Role.DECODE), content=content)
        for name, content in contents.items()
    ]
    world = World(*nodes)
    assert world.in_view == contents.keys()
    assert Counter(world.pool.view.content_for(turn, vector=False) for turn in range(30)) == {"x": 20, "y": 10}
    assert Counter(world.pool.view.content_for(turn, vector=True) for turn in range(30)) == {"x": 10, "y": 10, "z": 10}
    chooser, hashes = Chooser(world.pool, PolicyName.LEAST_WAIT, LocalPrefill.NEVER), PromptHashes([], None)
    for _ in range(30):
        decision = chooser.choose(RoutingRequest(1000, 10), hashes)
        assert {node.content for node in (decision.prefill, decision.decode) if node} in ({"x"}, {"y"})
        assert chooser.choose(RoutingRequest(1000, 10, content="y"), hashes).decode == nodes[3]
    world.pool.set_members(nodes[:3])
    with pytest.raises(Unavailable):
        chooser.choose(RoutingRequest(1000, 10, content="y"), hashes)
    assert chooser.choose(RoutingRequest(1000, 10), hashes).decode in nodes[:2]


def test_an_answer_that_ends_on_a_node_that_left_is_not_expected_of_its_successor() -> None:
    world = World()
    chooser = Chooser(world.pool, PolicyName.PREFIX_AFFINITY, LocalPrefill.NEVER)
    node, successor = info("d0"), info("d0", 2)
    world.pool.set_members([node])
    world.say(node)
    hashes = PromptHashes(range(64), None)
    assert chooser.choose(RoutingRequest(64, 10), hashes).decode == node
    world.pool.set_members([])
    chooser.forget("d0")
    chooser.answered(node, hashes, range(64))
    chooser.sent_elsewhere("d0", chooser.marks_of(hashes, 16))
    world.pool.set_members([successor])
    world.say(successor)
    assert "cached" not in chooser.choose(RoutingRequest(65, 10), hashes).reason


def test_a_node_with_another_tokenizer_than_the_router_gets_nothing() -> None:
    pool = NodePool("fake", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None, tokenizer="t")
    digests = {"a": "t", "b": "u", "c": ""}
    pool.set_members([msgspec.structs.replace(info(name), tokenizer=digest) for name, digest in digests.items()])
    foreign = {member.info.node_id: "tokenizer.json" in str(pool.unusable(member)) for member in pool.members}
    assert foreign == {"a": False, "b": True, "c": False}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["say", "wedge", "drain", "sent", "answered", "suspect", "leave", "deaf", "pass"]),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_what_is_kept_between_two_looks_is_what_a_fresh_look_would_find(operations: list[tuple[str, int, int]]) -> None:
    world = World()
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE, Role.AGGREGATED]
    infos = [info(f"n{index}", role=role) for index, role in enumerate(roles)]
    world.pool.set_members(infos)
    for name, number, amount in operations:
        node, request = infos[number], f"request {amount}"
        match name:
            case "say":
                world.say(node, running=amount, free_blocks=amount)
            case "wedge":
                world.say(node, step_age_s=1000.0)
            case "drain":
                world.say(node, state=NodeState.DRAINING)
            case "sent":
                world.pool.sent(node.node_id, request, amount, amount + 1)
            case "answered":
                world.pool.answered(node.node_id, request)
            case "suspect":
                world.pool.suspect(node.node_id, node.epoch, "its queue is full")
            case "leave":
                world.pool.set_members([each for each in infos if each != node])
                world.pool.set_members(infos)
            case "deaf":
                member = world.pool.member(node.node_id)
                assert member is not None
                world.pool.note_deaf(member, amount % 2 == 0)
            case "pass":
                world.pass_time(amount / 10)
        snapshot = world.pool.view.snapshot()
        seen = {view.node_id: view for view in (*snapshot.prefill, *snapshot.decode)}
        usable = {m.info.node_id: m for m in world.pool.members if world.pool.unusable(m) is None}
        assert seen.keys() == usable.keys()
        for node_id, member in usable.items():
            view, pending = seen[node_id], member.pending.values()
            assert view.status is member.status
            assert view.pending_requests == len(pending)
            assert view.pending_tokens == sum(tokens for _, tokens, _ in pending)
            assert view.pending_blocks == sum(blocks for _, _, blocks in pending)


def test_a_paused_node_gets_nothing_new_while_another_is_there() -> None:
    world, late = World(P0, D0, D1), info("x0", role=Role.AGGREGATED)
    world.pool.set_paused(["d0", "prefill"])
    assert (world.in_view, world.pool.is_paused) == ({"d1"}, False)
    assert world.lost == [], "its requests go on"
    world.pool.set_paused(["decode"])
    assert world.pool.is_paused
    assert world.in_view == {"p0", "d0", "d1"}, "requests that move find them; the line holds new ones back"
    world.pool.set_members([P0, D0, D1, late])
    world.say(late)
    assert (world.in_view, world.pool.is_paused) == ({"p0", "x0"}, False)
    world.pool.set_paused([])
    assert world.in_view == {"p0", "d0", "d1", "x0"}


def test_an_adapter_is_served_once_every_node_in_view_has_the_same_and_until_one_has_unloaded_it() -> None:
    world, both, sql = World(), {"sql": "1", "law": "2"}, {"sql": "1"}

    def served() -> Mapping[str, str]:
        return world.pool.view.adapters()

    world.pool.set_members([P0, D0, D1])
    assert served() == {}
    for node in (P0, D0):
        world.say(node, adapters=both)
    assert served() == both
    world.say(D1, adapters={"sql": "1", "law": "other", "tax": "3"})
    assert served() == both, "those that can serve it"
    world.say(D0, adapters={})
    assert served() == {}
    world.say(D0, adapters=sql)
    world.say(D1, adapters=sql, state=NodeState.DRAINING)
    assert served() == sql
    world.pool.set_members([P0])
    assert served() == both
    world.pool.set_members([])
    assert served() == both, "requests wait for nodes like the model's own"


def test_nodes_of_the_next_version_serve_and_those_further_off_get_nothing() -> None:
    versions = {f"d{ahead}": WIRE_VERSION + ahead for ahead in (0, REACH, REACH + 1)}
    world = World(*(msgspec.structs.replace(info(name), wire_version=each) for name, each in versions.items()))
    assert world.in_view == {"d0", f"d{REACH}"}
    (left,) = [why for member in world.pool.members if (why := world.pool.unusable(member)) is not None]
    assert f"it speaks version {WIRE_VERSION + REACH + 1} of Tandem's messages" in left


def test_members_that_get_no_requests_are_named_with_the_reason() -> None:
    world = World(D0, P0)
    world.pool.set_members([D0, P0, D1])
    world.pool.set_paused(["p0"])
    assert world.pool.out_of_view() == {"d1": "it has not reported its status yet"}, "a pause was wished for"
    world.say(D1)
    assert world.pool.out_of_view() == {}
    world.say(D0, state=NodeState.FAILED, detail="out of luck")
    assert world.pool.out_of_view() == {"d0": "it failed: out of luck"}


def test_an_image_meets_the_same_encoder_node_as_long_as_it_is_in_view() -> None:
    encoders = [info(f"encode-{index}", role=Role.ENCODE) for index in range(3)]
    reader, world, digests = info("a0", role=Role.AGGREGATED), World(), [f"image-{index}" for index in range(40)]

    def chosen() -> list[NodeInfo]:
        return world.pool.view.encoders_for("", digests)

    world.pool.set_members([*encoders, reader])
    assert chosen() == []
    for node in (*encoders, reader):
        world.say(node)
    assert world.in_view == {"a0"}  # no request is sent to an encoder node
    before = chosen()
    assert {node.node_id for node in before} == {node.node_id for node in encoders}
    assert chosen() == before
    assert world.pool.view.encoders_for("another model", digests) == []
    world.say(encoders[1], state=NodeState.DRAINING)
    after = chosen()
    assert encoders[1] not in after
    assert all(new == old for new, old in zip(after, before, strict=True) if old != encoders[1])
    for node in (encoders[0], encoders[2]):
        world.say(node, state=NodeState.FAILED, detail="broken")
    assert chosen() == []
    world.say(encoders[1])
    assert set(chosen()) == {encoders[1]}
    world.pool.set_members([reader])
    assert chosen() == []
