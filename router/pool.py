"""The members of the cluster and their last reports. Only the event loop writes them.

A node is in view, and gets requests, once it has answered a ping, while it sends messages and says that it is
ready. It is lost when the controller drops its epoch, when it falls silent, or when it says that it failed.
Then `on_lost` is called once, and its requests go on elsewhere.

A process on a busy machine may get no CPU time for seconds and be silent, while its kernel still accepts
connections for it. As long as no other node could take over its requests, such a node is only out of view,
and its requests wait for it: beginning them again would give more work to nodes that have no time for what
they have.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tandem.router.config import Heartbeat
from tandem.router.in_view import NodesInView
from tandem.router.member import Member
from tandem.router.policy.views import Average
from tandem.wire.forecasts import ForecastScore
from tandem.wire.listening import Listener
from tandem.wire.nodes import NodeInfo, NodeSighting, NodeState, PoolReport, Role
from tandem.wire.requests import NodeStatus
from tandem.wire.versions import WIRE_VERSION, out_of_reach

logger = logging.getLogger(__name__)

# A status may have been written just before the node read a Submit that this router sent earlier.
STATUS_LAG_S = 0.15
_READY = NodeState.READY  # looked up once instead of with every status


class NodePool:
    def __init__(
        self,
        model_name: str,
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        on_lost: Callable[[NodeInfo, str], None],
        on_change: Callable[[], None],
        tokenizer: str = "",
        listener: Callable[[str], Listener] = lambda endpoint: Listener.UNKNOWN,
    ) -> None:
        self._listener = listener
        self._model_name = model_name
        self._tokenizer = tokenizer  # the SHA-256 of the router's tokenizer.json; "" without one
        self._heartbeat = heartbeat
        self._wedged_s = heartbeat.wedged
        self._clock = clock
        self._on_lost = on_lost
        self._on_change = on_change
        self._members: dict[str, Member] = {}
        self.nodes_since = clock()  # when a node last joined or left
        self.view = NodesInView(self._members)
        # The members' block sizes, each once.
        self.block_sizes: tuple[int, ...] = ()
        self._checked_at: float | None = None
        self.handover = Average()
        self._accusers: dict[str, list[str]] = {}  # by prefill node: the decode nodes where its KV arrived wrong
        self.paused: frozenset[str] = frozenset()  # names of pools and nodes that get no new requests
        self.reports: Sequence[PoolReport] = ()  # the controller's; empty without one
        self.forecasts = ForecastScore()  # likewise
        self.is_paused = False  # every node that can write answers is paused
        self.oldest_version = WIRE_VERSION  # the oldest version of Tandem's messages among the members
        self.foreign_messages = 0  # messages from nodes or epochs that are not members

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def counted_members(self) -> list[Member]:
        return [member for member in self._members.values() if member.counters_at is not None]

    def now(self) -> float:
        return self._clock()

    def member(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def set_members(self, infos: Iterable[NodeInfo]) -> tuple[list[NodeInfo], list[NodeInfo]]:
        """Replaces the membership. Returns the nodes that joined and those that left; a node with a new epoch
        is in both. Calls `on_lost` for each node that left and was not lost before."""
        wanted = {info.node_id: info for info in infos}
        gone = [m for m in self._members.values() if wanted.get(m.info.node_id) != m.info]
        for member in gone:
            del self._members[member.info.node_id]
            self.view.drop(member)
        came = [info for node_id, info in wanted.items() if node_id not in self._members]
        if came or gone:
            self.nodes_since = self._clock()
        for info in came:
            self._members[info.node_id] = member = Member.of(info, self._clock())
            if (why := self._foreign(member)) is not None:
                logger.error("node %s gets no requests: %s", info.node_id, why)
        for member in self._members.values():
            member.foreign = self._foreign(member)
        self._count_accusers()
        self.block_sizes = tuple(
            {each.info.block_size for each in self._members.values() if each.info.role.runs_requests}
        )
        self.oldest_version = min((member.info.wire_version for member in self._members.values()), default=WIRE_VERSION)
        self.view.changed()
        self._changed()
        for member in gone:
            if member.lost is None:
                self._on_lost(member.info, "it left the cluster")
        return came, [member.info for member in gone]

    def older_than(self, version: int) -> frozenset[str]:
        """Ids of the members whose version of Tandem's messages is older than this one."""
        return frozenset(name for name, member in self._members.items() if member.info.wire_version < version)

    def set_paused(self, names: Iterable[str]) -> None:
        """Keeps new requests from these pools and nodes; running ones go on. When every node that writes
        answers is paused, all stay in view, for requests that must move, and admission holds new requests
        back instead."""
        names = frozenset(names)
        if names != self.paused:
            self.paused = names
            self._changed()

    def _is_held_back(self, member: Member) -> bool:
        return bool(self.paused) and (member.info.node_id in self.paused or member.info.role.value in self.paused)

    def sightings(self) -> list[NodeSighting]:
        now = self._clock()
        return [
            NodeSighting(
                member.info.node_id,
                member.info.epoch,
                now - (member.joined_at if member.heard_at is None else member.heard_at),
                *((said.state, said.step_age_s, said.detail) if (said := member.reported) else ()),
            )
            for member in self._members.values()
        ]

    def on_status(self, status: NodeStatus) -> None:
        member = self._members.get(status.node_id)
        if member is None or member.epoch != status.epoch:
            self.foreign_messages += 1
            return
        now = self._clock()
        if member.lists_any or status.left_out or status.adapters:
            self._note_lists(member, status)
        member.status = status
        member.status_at = member.heard_at = now
        if status.counters is not None:
            member.counters, member.counters_at = status.counters, now
        member.rates.on_status(status)
        if member.pending_requests:
            member.forget_sent_before(now - STATUS_LAG_S - status.age_s)
        # The common case: a node in view that is still ready.
        if member.is_in_view and status.state is _READY and status.step_age_s <= self._wedged_s:
            if (shortlist := member.shortlist) is not None:
                shortlist.put(member)
        else:
            member.is_starved = False
            if status.state is NodeState.FAILED:
                self._lose(member, f"it failed: {status.detail or 'no reason given'}")
            elif member.lost is not None:
                self._revive(member)
            self._look_at(member)
        self._on_change()

    def _note_lists(self, member: Member, latest: NodeStatus) -> None:
        """Compares a status with the one before. Must be called before it becomes the member's status."""
        before, member.status = member.status, latest
        member.lists_any = bool(latest.left_out or latest.adapters)
        if latest.left_out != before.left_out:
            self._note_accusers(latest)
        if latest.adapters != before.adapters or latest.replaced_adapters != before.replaced_adapters:
            self.view.adapters_changed(before.adapters.keys() - latest.adapters.keys())

    def _note_accusers(self, latest: NodeStatus) -> None:
        logger.warning(
            "node %s %s",
            latest.node_id,
            f"takes nothing from {', '.join(latest.left_out)}: KV arrived wrong"
            if latest.left_out
            else "takes KV from all again",
        )
        self._count_accusers()
        for member in self._members.values():
            self._look_at(member)

    def _count_accusers(self) -> None:
        self._accusers = {}
        for member in self._members.values():
            for accused in member.status.left_out:
                self._accusers.setdefault(accused, []).append(member.info.node_id)

    def heard(self, node_id: str, epoch: int) -> bool:
        """A message shows that the node lives. Returns False when its sender is not a member: the message is counted,
        and the caller drops it."""
        member = self._members.get(node_id)
        if member is None or member.info.epoch != epoch:
            self.foreign_messages += 1
            return False
        member.heard_at = self._clock()
        if member.is_starved:
            member.is_starved = False
            self._changed(member)
        if member.lost is not None and member.has_reported and member.status.state is not NodeState.FAILED:
            self._revive(member)
        return True

    def _revive(self, member: Member) -> None:
        logger.info("node %s is back", member.info.node_id)
        member.lost = None
        self._changed(member)

    def check_silence(self) -> bool:
        """Marks silent nodes as lost. Must be called several times within `heartbeat.silence`.

        If the last call was long ago, the router itself did not run (stopped, starved, asleep), and what
        nodes sent in that time still waits in its queue. Then all nodes get their whole time again, and the
        result is False.
        """
        now = self._clock()
        was_away = self._checked_at is not None and now - self._checked_at > self._heartbeat.silence / 2
        self._checked_at = now
        if was_away:
            logger.warning("the router itself did not run for a while: nodes' silence in that time does not count")
            for member in self._members.values():
                if member.heard_at is not None:
                    member.heard_at = now
            return False
        for member in list(self._members.values()):
            if member.lost is None and member.heard_at is not None:
                self._check_silent(member, now - member.heard_at)
        return True

    def _check_silent(self, member: Member, silent_s: float) -> None:
        limits, now = self._heartbeat, self._clock()
        if silent_s <= limits.silence / 2:
            return
        if self._listener(member.info.request_endpoint) is Listener.ACCEPTS:
            member.accepted_at = now
        if silent_s <= limits.silence:
            return
        lives = member.accepted_at is not None and now - member.accepted_at <= limits.silence
        if lives and silent_s <= limits.starved and not self._is_replaceable(member):
            if not member.is_starved:
                member.is_starved = True
                logger.warning(
                    "node %s is silent while its machine answers: its requests wait for it", member.info.node_id
                )
                self._changed(member)
        else:
            self._lose(member, f"it has been silent for {silent_s:.1f} s")

    def _is_replaceable(self, member: Member) -> bool:
        """Whether another node in view could do the same work."""
        if not member.info.role.runs_requests:
            return True  # nodes that compute prompts can encode images, too
        shortlist = self.view.shortlist_of(member.info.content)
        lane = shortlist.decode if member.info.role.writes_answers else shortlist.prefill
        return len(lane.views) > (member.info.node_id in lane.views)

    def note_deaf(self, member: Member, is_deaf: bool) -> None:
        if member.is_deaf != is_deaf:
            member.is_deaf = is_deaf
            logger.warning(
                "node %s %s what it is sent", member.info.node_id, "does not receive" if is_deaf else "receives"
            )
            self._changed(member)

    def suspect(self, node_id: str, epoch: int, why: str) -> None:
        """Marks a node as lost for a reason other than silence, for example a full send queue."""
        member = self._members.get(node_id)
        if member is not None and member.info.epoch == epoch:
            self._lose(member, why)

    def _lose(self, member: Member, why: str) -> None:
        if member.lost is not None:
            return
        member.lost, member.is_starved = why, False
        member.forget_sent()
        logger.warning("node %s is lost: %s", member.info.node_id, why)
        self._changed(member)
        self._on_lost(member.info, why)

    def sent(self, node_id: str, request_id: str, tokens: int, blocks: int = 0) -> None:
        if (member := self._members.get(node_id)) is not None:
            member.note_sent(request_id, self._clock(), tokens, blocks)
            member.file()

    def answered(self, node_id: str, request_id: str) -> bool:
        """Drops a request from what was sent since the node's status. Returns whether it was still
        pending."""
        member = self._members.get(node_id)
        was_pending = member is not None and member.note_answered(request_id)
        if member is not None and was_pending:
            member.file()
        return was_pending

    def _look_at(self, member: Member) -> None:
        """Puts the node into view or takes it out, according to `unusable`."""
        if self.unusable(member) is not None:
            self.view.drop(member)
        else:
            self.view.put(member)

    def _foreign(self, member: Member) -> str | None:
        """Returns why no request of this router may ever run on this node, or None."""
        info = member.info
        if (why := out_of_reach(info.wire_version)) is not None:
            return why
        if info.model != self._model_name:
            return f"it serves the model {info.model!r}, not {self._model_name!r}"
        if self._tokenizer and info.tokenizer and info.tokenizer != self._tokenizer:
            return "its tokenizer.json differs from the router's"
        return None

    def out_of_view(self) -> dict[str, str]:
        """By node id: why members get no new requests although no operator paused them."""
        return {
            member.info.node_id: why
            for member in self._members.values()
            if not member.is_in_view and not self._is_held_back(member) and (why := self.unusable(member)) is not None
        }

    def ready_by_role(self) -> Counter[Role]:
        """How many members may get new requests."""
        return Counter(each.info.role for each in self._members.values() if self.unusable(each) is None)

    def absent(self) -> list[tuple[str, Role, str, str]]:
        """Returns the nodes that should serve and are no members: the id, the role, the state and why."""
        return [
            (node_id, report.role, state, why)
            for report in self.reports
            for state, nodes in (("down", report.down), ("left out", report.left_out))
            for node_id, why in nodes.items()
            if node_id not in self._members
        ]

    def unusable(self, member: Member) -> str | None:
        """Returns why the node gets no new requests, or None."""
        if member.foreign is not None:
            return member.foreign
        if member.lost is not None:
            return member.lost
        if member.is_starved:
            return "it is silent while its machine answers: it gets no time to run"
        if member.is_deaf:
            return "it does not receive what it is sent"
        if not member.has_reported:
            return "it has not reported its status yet"
        if member.status.state is not NodeState.READY:
            return f"it is {member.status.state.value}"
        if not self.is_paused and self._is_held_back(member):
            return "it is paused"
        accusers = self._accusers.get(member.info.node_id, ()) if self._accusers else ()
        if len(accusers) > 1:  # a single accuser may have a broken network card itself
            return f"its KV arrived wrong at {', '.join(sorted(accusers))}"
        if member.status.step_age_s > self._heartbeat.wedged:
            return f"its engine has not completed a step for {member.status.step_age_s:.0f} s"
        return None

    def _changed(self, member: Member | None = None) -> None:
        """Looks again whether requests may go to this node, or, with None, to each node."""
        if member is None:
            writers = [each for each in self._members.values() if each.info.role.writes_answers]
            self.is_paused = bool(self.paused and writers) and all(map(self._is_held_back, writers))
        for each in self._members.values() if member is None else (member,):
            self._look_at(each)
        self.view.changed()
        self._on_change()
