from __future__ import annotations

from collections import Counter
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
    def __init__(self) -> None:
        self.now = 1000.0
        self.lost: list[tuple[str, int, str]] = []
        self.changes = 0
        self.listeners: dict[str, Listener] = {}  # what a machine's kernel does with a connection, by node
        self.pool = NodePool(
            "fake",
            Heartbeat(),
            lambda: self.now,
            self._on_lost,
            self._on_change,
            listener=lambda endpoint: self.listeners.get(
                endpoint.removeprefix("tcp://").removesuffix(":1"), Listener.UNKNOWN
            ),
        )

    def _on_lost(self, node: NodeInfo, why: str) -> None:
        self.lost.append((node.node_id, node.epoch, why))

    def _on_change(self) -> None:
        self.changes += 1

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


@pytest.fixture
def world() -> World:
    return World()


def test_a_member_is_in_view_once_it_has_spoken(world: World) -> None:
    node = info("d0")
    assert world.pool.set_members([node]) == ([node], [])
    assert world.in_view == set()
    world.pass_time(10)
    assert world.lost == []  # no router had sent it anything
    world.say(node)
    assert world.in_view == {"d0"}


def test_counters_are_kept_until_a_status_has_newer_ones(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node, counters=NodeCounters(steps=5))
    counted_at = world.now
    world.now += 0.25
    world.say(node, counters=None, running=2)
    member = world.pool.member("d0")
    assert member is not None
    assert (member.status.running, member.counters.steps, member.counters_at) == (2, 5, counted_at)
    world.say(node, counters=NodeCounters(steps=7))
    assert (member.counters.steps, member.counters_at) == (7, world.now)


def test_silence_loses_a_node_once_and_a_word_brings_it_back(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    world.pass_time(2)
    assert world.in_view == {"d0"}
    world.pass_time(0.8)  # however it froze, it is out of view within three seconds
    assert [(name, epoch) for name, epoch, _ in world.lost] == [("d0", 1)]
    assert "silent" in world.lost[0][2]
    assert world.in_view == set()
    world.pass_time(5)
    assert len(world.lost) == 1
    world.say(node)
    assert world.in_view == {"d0"}


def test_a_starved_node_that_none_could_replace_is_out_of_view_and_not_lost(world: World) -> None:
    """Its process gets no time, and its machine answers for it: what it has waits there."""
    prefill, decode = info("p0", role=Role.PREFILL), info("d0")
    world.pool.set_members([prefill, decode])
    world.listeners["p0"] = Listener.ACCEPTS
    world.say(prefill)
    for _ in range(4):
        world.say(decode)
        world.pass_time(2)
    assert world.lost == []
    assert world.in_view == {"d0"}
    assert (
        world.pool.unusable(world.pool.members[0]) == "it is silent while its machine answers: it gets no time to run"
    )
    world.say(prefill)
    assert world.in_view == {"p0", "d0"}
    for _ in range(6):
        world.say(decode)
        world.pass_time(2)
    assert [name for name, _, _ in world.lost] == ["p0"], "not for ever"


@pytest.mark.parametrize("listener", [Listener.UNKNOWN, Listener.REFUSES, Listener.DOES_NOT_ANSWER])
def test_a_silent_node_whose_machine_does_not_answer_for_it_is_lost(world: World, listener: Listener) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.listeners["d0"] = listener
    world.say(node)
    world.pass_time(2.8)
    assert len(world.lost) == 1


def test_a_starved_node_is_left_as_soon_as_another_can_take_its_requests(world: World) -> None:
    """Its requests would have to wait for it, and need not."""
    first, second = info("d0"), info("d1")
    world.pool.set_members([first, second])
    world.listeners |= {"d0": Listener.ACCEPTS, "d1": Listener.ACCEPTS}
    world.say(first)
    world.pass_time(4)
    assert world.lost == []
    world.say(second)
    world.pass_time(0.3)
    assert [name for name, _, _ in world.lost] == ["d0"]


def test_a_prefill_node_whose_kv_arrives_wrong_at_two_nodes_gets_nothing_new(world: World) -> None:
    """At one it may be that node's own network card."""
    prefill, first, second = info("p0", role=Role.PREFILL), info("d0"), info("d1")
    world.pool.set_members([prefill, first, second])
    world.say(prefill)
    world.say(first, left_out=["p0"])
    world.say(second)
    assert world.in_view == {"p0", "d0", "d1"}
    world.say(second, left_out=["p0"])
    assert world.in_view == {"d0", "d1"}
    assert world.pool.unusable(world.pool.members[0]) == "its KV arrived wrong at d0, d1"
    world.say(first)
    assert world.in_view == {"p0", "d0", "d1"}


def test_nodes_that_left_accuse_nobody(world: World) -> None:
    """Two decode nodes are replaced, as an operator does who looks for the broken part. Their successors have no complaint."""
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


def test_tokens_are_a_sign_of_life(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    for _ in range(5):
        world.pass_time(2)
        assert world.pool.heard("d0", 1)
    assert world.in_view == {"d0"}


def test_a_router_that_was_away_blames_nobody(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    world.pass_time(1)
    world.now += 60
    world.pool.check_silence()
    assert world.lost == []
    world.pass_time(4)
    assert len(world.lost) == 1


def test_leaving_and_coming_back_with_another_epoch(world: World) -> None:
    old, new = info("d0", 1), info("d0", 2)
    world.pool.set_members([old])
    world.say(old)
    assert world.pool.set_members([new]) == ([new], [old])
    assert [(name, epoch) for name, epoch, _ in world.lost] == [("d0", 1)]
    world.say(old)
    assert world.in_view == set()
    assert world.pool.foreign_messages == 1
    world.say(new)
    assert world.in_view == {"d0"}


def test_the_same_membership_again_changes_nothing(world: World) -> None:
    nodes = [info("d0"), info("p0", role=Role.PREFILL)]
    world.pool.set_members(nodes)
    for node in nodes:
        world.say(node)
    assert world.pool.set_members(list(reversed(nodes))) == ([], [])
    assert world.in_view == {"d0", "p0"}
    assert world.lost == []


def test_strangers_are_counted_and_not_believed(world: World) -> None:
    world.say(info("x0"))
    assert not world.pool.heard("x0", 1)
    assert world.in_view == set()
    assert world.pool.foreign_messages == 2


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.DRAINING])
def test_only_ready_nodes_get_requests_but_others_keep_theirs(world: World, state: NodeState) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    world.say(node, state=state)
    assert world.in_view == set()
    assert world.lost == []


def test_a_node_that_says_it_failed_is_lost(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    for _ in range(3):
        world.say(node, state=NodeState.FAILED, detail="out of memory")
    assert len(world.lost) == 1
    assert "out of memory" in world.lost[0][2]
    world.say(node)
    assert world.in_view == {"d0"}


def test_a_suspected_node_is_lost_until_it_speaks(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    world.pool.suspect("d0", 99, "of another epoch")
    assert world.lost == []
    world.pool.suspect("d0", 1, "its queue is full")
    world.pool.suspect("d0", 1, "its queue is full")
    assert len(world.lost) == 1
    assert world.in_view == set()


def test_what_was_sent_counts_until_a_status_shows_it(world: World) -> None:
    node = info("p0", role=Role.PREFILL)
    world.pool.set_members([node])
    world.say(node)
    world.pool.sent("p0", "r1", 100)
    world.pool.sent("p0", "r2", 50)
    (view,) = world.pool.view.snapshot().prefill
    assert (view.pending_requests, view.pending_tokens) == (2, 150)
    world.pool.answered("p0", "r1")
    assert world.pool.view.snapshot().prefill[0].pending_tokens == 50
    world.say(node)  # written before it can have read them
    assert world.pool.view.snapshot().prefill[0].pending_tokens == 50
    world.now += 0.2
    world.say(node)
    assert world.pool.view.snapshot().prefill[0].pending_tokens == 0


def test_a_snapshot_is_one_value_until_nodes_come_or_go_and_its_views_are_as_the_nodes_are(world: World) -> None:
    node = info("d0")
    world.pool.set_members([node])
    world.say(node)
    first = world.pool.view.snapshot()
    world.pool.sent("d0", "r", 1)
    world.say(node, running=3)
    assert world.pool.view.snapshot() is first
    assert (first.decode[0].pending_requests, first.decode[0].status.running) == (1, 3)
    world.say(node, state=NodeState.DRAINING)
    assert world.pool.view.snapshot().decode == ()


def test_another_model_is_never_in_view(world: World) -> None:
    node = info("d0", model="other")
    world.pool.set_members([node])
    world.say(node)
    assert world.in_view == set()


def test_the_context_is_the_shortest_of_those_in_view(world: World) -> None:
    assert world.pool.view.max_model_len() is None
    long, short = info("d0"), msgspec.structs.replace(info("p0", role=Role.PREFILL), max_model_len=512)
    world.pool.set_members([long, short])
    world.say(long)
    assert world.pool.view.max_model_len() == 2048
    world.say(short)
    assert world.pool.view.max_model_len() == 512


def test_each_request_runs_on_nodes_of_one_content(world: World) -> None:
    """Which contents there are, the controller decides: two, while one takes the other's place."""
    nodes = [
        msgspec.structs.replace(info(name, role=role), content=content)
        for name, role, content in (
            ("d0", Role.DECODE, "x"),
            ("d1", Role.DECODE, "x"),
            ("p0", Role.PREFILL, "x"),
            ("d2", Role.DECODE, "y"),
            ("p1", Role.PREFILL, "y"),
            ("p2", Role.PREFILL, "z"),  # nothing could decode what it reads
        )
    ]
    world.pool.set_members(nodes)
    for node in nodes:
        world.say(node)
    assert world.in_view == {node.node_id for node in nodes}
    assert Counter(world.pool.view.content_for(turn, vector=False) for turn in range(30)) == {"x": 20, "y": 10}
    assert Counter(world.pool.view.content_for(turn, vector=True) for turn in range(30)) == {"x": 10, "y": 10, "z": 10}
    chooser = Chooser(world.pool, PolicyName.LEAST_WAIT, LocalPrefill.NEVER)
    hashes = PromptHashes([], None)
    for _ in range(30):
        decision = chooser.choose(RoutingRequest(1000, 10), hashes)
        assert {node.content for node in (decision.prefill, decision.decode) if node} in ({"x"}, {"y"})
        moved = chooser.choose(RoutingRequest(1000, 10, content="y"), hashes)
        assert moved.decode == nodes[3]
    world.pool.set_members(nodes[:3])
    with pytest.raises(Unavailable):
        chooser.choose(RoutingRequest(1000, 10, content="y"), hashes)
    assert chooser.choose(RoutingRequest(1000, 10), hashes).decode in nodes[:2]


def test_an_answer_that_ends_on_a_node_that_left_is_not_expected_of_its_successor(world: World) -> None:
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


def test_a_node_with_another_tokenizer_than_the_router_gets_nothing(world: World) -> None:
    pool = NodePool("fake", Heartbeat(), lambda: 0.0, lambda node, why: None, lambda: None, tokenizer="t")
    nodes = [
        msgspec.structs.replace(info(name), tokenizer=digest) for name, digest in (("a", "t"), ("b", "u"), ("c", ""))
    ]
    pool.set_members(nodes)
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


def test_a_paused_node_gets_nothing_new_while_another_is_there(world: World) -> None:
    nodes = [info("p0", role=Role.PREFILL), info("d0"), info("d1")]
    world.pool.set_members(nodes)
    for node in nodes:
        world.say(node)
    world.pool.set_paused(["d0", "prefill"])
    assert (world.in_view, world.pool.is_paused) == ({"d1"}, False)
    assert world.lost == [], "its requests go on"
    world.pool.set_paused(["decode"])
    assert world.pool.is_paused
    assert world.in_view == {"p0", "d0", "d1"}, "requests that move find them; the line holds new ones back"
    late = info("x0", role=Role.AGGREGATED)
    world.pool.set_members([*nodes, late])
    world.say(late)
    assert (world.in_view, world.pool.is_paused) == ({"p0", "x0"}, False)
    world.pool.set_paused([])
    assert world.in_view == {"p0", "d0", "d1", "x0"}


def test_an_adapter_is_served_once_every_node_in_view_has_the_same_and_until_one_has_unloaded_it(world: World) -> None:
    nodes = [info("p0", role=Role.PREFILL), info("d0"), info("d1")]
    world.pool.set_members(nodes)
    assert world.pool.view.adapters() == {}
    for node in nodes[:2]:
        world.say(node, adapters={"sql": "1", "law": "2"})
    assert world.pool.view.adapters() == {"sql": "1", "law": "2"}
    world.say(nodes[2], adapters={"sql": "1", "law": "other", "tax": "3"})
    assert world.pool.view.adapters() == {"sql": "1", "law": "2"}, "those that can serve it"
    world.say(nodes[1], adapters={})
    assert world.pool.view.adapters() == {}
    world.say(nodes[1], adapters={"sql": "1"})
    world.say(nodes[2], adapters={"sql": "1"}, state=NodeState.DRAINING)
    assert world.pool.view.adapters() == {"sql": "1"}
    world.pool.set_members(nodes[:1])
    assert world.pool.view.adapters() == {"sql": "1", "law": "2"}
    world.pool.set_members([])
    assert world.pool.view.adapters() == {"sql": "1", "law": "2"}, "requests wait for nodes like the model's own"


def test_nodes_of_the_next_version_serve_and_those_further_off_get_nothing(world: World) -> None:
    nodes = [
        msgspec.structs.replace(info(f"d{ahead}"), wire_version=WIRE_VERSION + ahead) for ahead in (0, REACH, REACH + 1)
    ]
    world.pool.set_members(nodes)
    for node in nodes:
        world.say(node)
    assert world.in_view == {"d0", f"d{REACH}"}
    (left,) = [why for member in world.pool.members if (why := world.pool.unusable(member)) is not None]
    assert f"it speaks version {WIRE_VERSION + REACH + 1} of Tandem's messages" in left


def test_members_that_get_no_requests_are_named_with_the_reason(world: World) -> None:
    spoken, silent, paused = info("d0"), info("d1"), info("p0", role=Role.PREFILL)
    world.pool.set_members([spoken, silent, paused])
    for node in (spoken, paused):
        world.say(node)
    world.pool.set_paused(["p0"])
    assert world.pool.out_of_view() == {"d1": "it has not reported its status yet"}, "a pause was wished for"
    world.say(silent)
    assert world.pool.out_of_view() == {}
    world.say(spoken, state=NodeState.FAILED, detail="out of luck")
    assert world.pool.out_of_view() == {"d0": "it failed: out of luck"}


def test_an_image_meets_the_same_encoder_node_as_long_as_it_is_in_view(world: World) -> None:
    encoders = [info(f"encode-{index}", role=Role.ENCODE) for index in range(3)]
    reader = info("a0", role=Role.AGGREGATED)
    world.pool.set_members([*encoders, reader])
    assert world.pool.view.encoders_for("", ["x"]) == []
    for node in (*encoders, reader):
        world.say(node)
    assert world.in_view == {"a0"}  # no request is sent to an encoder node
    digests = [f"image-{index}" for index in range(40)]
    before = world.pool.view.encoders_for("", digests)
    assert {node.node_id for node in before} == {node.node_id for node in encoders}
    assert world.pool.view.encoders_for("", digests) == before
    assert world.pool.view.encoders_for("another model", digests) == []
    world.say(encoders[1], state=NodeState.DRAINING)
    after = world.pool.view.encoders_for("", digests)
    assert encoders[1] not in after
    assert all(new == old for new, old in zip(after, before, strict=True) if old != encoders[1])
    for node in (encoders[0], encoders[2]):
        world.say(node, state=NodeState.FAILED, detail="broken")
    assert world.pool.view.encoders_for("", digests) == []
    world.say(encoders[1])
    assert set(world.pool.view.encoders_for("", digests)) == {encoders[1]}
    world.pool.set_members([reader])
    assert world.pool.view.encoders_for("", digests) == []
