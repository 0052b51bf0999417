"""The few nodes of a pool that a policy ranks, kept up to date with every status and every request.

Ranking every node would make each request's cost grow with the pool. So each node is filed under how long a
request would roughly wait there. Nodes of about the same speed form a class, because a prompt's own time
differs between classes. A shortlist has the first nodes of each class (not of slow classes while faster nodes
are idle), the nodes that have most of the prompt cached, and the node with the most free blocks.

`Room` keeps how many blocks the decode nodes have free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from math import log2

from tandem.router.config import PolicyName
from tandem.router.policy.views import (
    ASSUMED_PREFILL_TOKENS_PER_S,
    ASSUMED_STEP_S,
    NodeView,
    PoolSnapshot,
    RoutingRequest,
    blocks_for,
    first_by_rendezvous,
    line_wait_s,
)
from tandem.router.prefixes import Overlaps
from tandem.wire.nodes import NodeInfo, Role

# Looked up once: every status of every node passes here, and looking up a member of an enumeration takes
# longer than adding a number.
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE


def _geometry(info: NodeInfo) -> tuple[int, bool, int]:
    return info.block_size, info.keeps_tokens, info.state_blocks


class _Alike:
    """Nodes on which a request takes the same number of blocks."""

    def __init__(self) -> None:
        self.views: dict[str, NodeView] = {}
        # An upper bound of the nodes' `room_blocks`. `roomiest` had that many when it was noted, and may have
        # fewer now.
        self.most = 0
        self.roomiest: NodeView | None = None

    def first_with(self, tokens: int) -> NodeView | None:
        """Returns a node with the blocks for so many tokens, or None. It searches all nodes only when the
        remembered roomiest one has too few."""
        best = self.roomiest or next(iter(self.views.values()), None)
        if best is None or (needed := blocks_for(tokens, best.info)) > self.most:
            return None
        if self.roomiest is None or best.room_blocks < needed:
            best = max(self.views.values(), key=lambda view: view.room_blocks)
            self.roomiest, self.most = best, max(0, best.room_blocks)
        return best if best.room_blocks >= needed else None


class Room:
    """How many blocks the decode nodes have free, updated with each written view."""

    def __init__(self) -> None:
        self._alike: dict[tuple[int, bool, int], _Alike] = {}
        self._only: _Alike | None = None  # if all nodes are alike, as they nearly always are: no lookup then
        self._idle = 0  # nodes without work; such a node takes any request

    def add(self, view: NodeView) -> None:
        alike = self._alike.setdefault(_geometry(view.info), _Alike())
        alike.views[view.node_id] = view
        self._only = alike if len(self._alike) == 1 else None

    def note(self, view: NodeView, is_idle: bool, blocks: int) -> None:
        """Files the view again after it was written. `blocks`: its `room_blocks`."""
        alike = self._only or self._alike[_geometry(view.info)]
        if blocks >= alike.most:
            alike.most, alike.roomiest = blocks, view
        if is_idle is not view.is_idle:
            view.is_idle = is_idle
            self._idle += 1 if is_idle else -1

    def drop(self, view: NodeView) -> None:
        alike = self._alike[_geometry(view.info)]
        del alike.views[view.node_id]
        if alike.roomiest is view:
            alike.roomiest = None
        self._idle -= view.is_idle
        view.is_idle = False

    def roomiest(self, tokens: int) -> NodeView | None:
        """Returns a node that has the blocks for so many tokens, or None."""
        for alike in self._alike.values():
            if (found := alike.first_with(tokens)) is not None:
                return found
        return None

    def has_room(self, tokens: int, promised: int) -> bool:
        """Whether a node has the blocks for a sequence of `tokens`, after the `promised` tokens of sequences
        that were admitted and not yet sent."""
        if not self._idle and self.roomiest(tokens) is None:
            return False
        if promised == 0:
            return True
        room = sum(view.room_tokens for alike in self._alike.values() for view in alike.views.values())
        return promised + tokens <= room


# How many nodes of every speed class are taken, and how many of those that have equally much of the prompt
# cached.
SHORTEST_WAITS, MOST_CACHED = 5, 3
# How many cached lengths are tried, and how many nodes are searched for one that has such a prefix and little
# work.
MOST_LENGTHS, MOST_LOOKS = 4, 48
# Waits are rounded to an eighth of a doubling, speeds to half of one.
_WAIT_STEPS, _SPEED_STEPS = 8, 2
_SHORTEST_WAIT_S = 0.0005
_WAITS = 1024  # places for waits within one speed class


def _place_of(wait_s: float) -> int:
    if wait_s <= 0.0:
        return 0
    place = int(_WAIT_STEPS * log2(1.0 + wait_s / _SHORTEST_WAIT_S))
    return place if place < _WAITS else _WAITS - 1


class Lane:
    """The nodes of one pool, ordered by place. A place is a speed class and, within it, a rounded wait: a
    lower number is a shorter wait."""

    def __init__(self) -> None:
        self.views: dict[str, NodeView] = {}
        # By place; the node that changed longest ago comes first.
        self._there: dict[int, dict[str, NodeView]] = {}
        self._places: list[int] = []  # the places that have nodes, in order
        self._by_name: list[str] | None = None

    def put(self, view: NodeView, place: int) -> None:
        """Moves the node to another place, or adds it."""
        old, node_id = view.place, view.info.node_id
        if old is None:
            self.views[node_id] = view
            self._by_name = None
        # A move by one place is skipped, because ranking the shortlist sees the exact wait. Places for nodes
        # without work are exact.
        elif -1 <= place - old <= 1 and place % _WAITS and old % _WAITS:
            return
        else:
            self._leave(node_id, old)
        view.place = place
        there = self._there.get(place)
        if there is None:
            self._there[place] = {node_id: view}
            insort(self._places, place)
        else:
            there[node_id] = view

    def drop(self, view: NodeView) -> None:
        if view.place is not None:
            self._leave(view.node_id, view.place)
            view.place = None
            del self.views[view.node_id]
            self._by_name = None

    def _leave(self, node_id: str, place: int) -> None:
        there = self._there[place]
        del there[node_id]
        if not there:
            del self._there[place]
            del self._places[bisect_left(self._places, place)]

    @property
    def names(self) -> list[str]:
        if self._by_name is None:
            self._by_name = sorted(self.views)
        return self._by_name

    def least_busy(self) -> Iterator[tuple[int, Iterator[tuple[str, NodeView]]]]:
        """For every speed class: its first place, and its nodes in the order of their waits. Nodes without a
        measured speed come first, then the slowest class."""
        places, there, first = self._places, self._there, 0
        while first < len(places):
            end = bisect_left(places, (places[first] // _WAITS + 1) * _WAITS, first)
            yield places[first], chain.from_iterable(there[place].items() for place in places[first:end])
            first = end

    def are_idle(self, place: int) -> bool:
        """Whether a class has enough nodes without work. Places are rounded, so the first node is checked
        exactly."""
        there = self._there[place]
        return place % _WAITS == 0 and len(there) >= SHORTEST_WAITS and next(iter(there.values())).queued_tokens == 0

    def pick(self, names: Iterable[str]) -> tuple[NodeView, ...]:
        views = self.views
        return tuple([views[name] for name in names])

    def at_home(self, listed: tuple[NodeView, ...], request: RoutingRequest) -> tuple[NodeView, ...]:
        """Adds the nodes of this pool that pin the request's job."""
        there = {view.node_id for view in listed}
        names = (name for name in request.home if name in self.views and name not in there)
        return (*listed, *self.pick(names))


class Shortlist:
    """The nodes in view with one model content, filed by how long a request would wait there."""

    def __init__(self) -> None:
        self.prefill, self.decode = Lane(), Lane()
        self.room = Room()

    def put(self, view: NodeView) -> None:
        """Files a node that requests may go to, when it is new or its view was written."""
        status, rates = view.status, view.rates
        role, rate = status.role, rates.prefill_tokens_per_s
        wait = (status.waiting_tokens + view.pending_tokens) / (rate or ASSUMED_PREFILL_TOKENS_PER_S)
        # All decode nodes are in one class, because other nodes compute their prompts.
        place = 0 if rate is None or role is _DECODE else (int(_SPEED_STEPS * log2(rate)) + 1) * _WAITS
        if role is _PREFILL:
            if wait:
                place += _place_of(wait)
            if place != view.place:
                self.prefill.put(view, place)
            return
        load = status.running + status.waiting + view.pending_requests
        if load:
            wait += load * (rates.step_s or ASSUMED_STEP_S)
        if wait:
            place += _place_of(wait)
        if view.place is None:
            self.room.add(view)
        if place != view.place:
            self.decode.put(view, place)
        blocks = status.free_blocks + status.pinned_blocks - status.wanted_blocks - view.pending_blocks
        self.room.note(view, not load, blocks)

    def drop(self, view: NodeView) -> None:
        """Takes out a node that gets no new requests."""
        if view.info.role is _PREFILL:
            self.prefill.drop(view)
        else:
            self.decode.drop(view)
            self.room.drop(view)

    def every_node(self, handover_s: float | None) -> PoolSnapshot:
        return PoolSnapshot(tuple(self.prefill.views.values()), tuple(self.decode.views.values()), handover_s)

    @property
    def readers(self) -> Collection[NodeView]:
        """The nodes that read prompts, which decode, too, where there are no others."""
        return (self.prefill if self.prefill.views else self.decode).views.values()

    def read_tokens_per_s(self) -> float:
        """How many tokens the readers read together. One that is not measured counts as the others do."""
        rates = [view.rates.line_tokens_per_s or view.rates.prefill_tokens_per_s for view in self.readers]
        known = [rate for rate in rates if rate]
        return sum(known) / len(known) * len(rates) if known else 0.0

    def line_wait_s(self) -> float:
        """The shortest wait until a prompt that arrives now is begun, at a prefill node, or, if there is
        none, at one that decodes."""
        lane = self.prefill if self.prefill.views else self.decode
        return min((line_wait_s(next(nodes)[1]) for _, nodes in lane.least_busy()), default=0.0)

    def of(
        self, policy: PolicyName, request: RoutingRequest, cached: Overlaps, handover_s: float | None
    ) -> PoolSnapshot:
        """Returns the nodes for `policy` to rank: among them the node that it would choose from all, or one
        where the request waits about as long."""
        listed = _LISTS.get(policy)
        if listed is None:
            return self.every_node(handover_s)
        decode = listed(self, self.decode, request, cached)
        # Such a decode node takes no KV from some prefill nodes, so all prefill nodes must be ranked.
        if any(view.status.left_out for view in decode):
            return self.every_node(handover_s)
        prefill = listed(self, self.prefill, request, cached)
        if request.home:
            prefill, decode = self.prefill.at_home(prefill, request), self.decode.at_home(decode, request)
        return PoolSnapshot(prefill, decode, handover_s)

    def _by_turn(self, lane: Lane, request: RoutingRequest, cached: Overlaps) -> tuple[NodeView, ...]:
        names = lane.names
        turns = (names[(request.turn + i) % len(names)] for i in range(len(names)))
        return lane.pick(dict.fromkeys(islice((name for name in turns if name not in request.avoid), 1)))

    def _by_session(self, lane: Lane, request: RoutingRequest, cached: Overlaps) -> tuple[NodeView, ...]:
        if request.session is None:
            return self._by_wait(lane, request, cached)
        names = [name for name in lane.names if name not in request.avoid]
        return lane.pick({first_by_rendezvous(names, request.session): None}) if names else ()

    def _by_wait(self, lane: Lane, request: RoutingRequest, cached: Overlaps) -> tuple[NodeView, ...]:
        avoid = request.avoid
        if len(lane.views) <= SHORTEST_WAITS and not avoid:
            return tuple(lane.views.values())
        chosen: dict[str, NodeView] = {}
        classes = list(lane.least_busy())
        # Idle prefill nodes compute a prompt sooner than slower nodes that have none of it cached.
        fast = 0
        if lane is self.prefill and not avoid:
            fast = next((place for place, _ in reversed(classes) if lane.are_idle(place)), 0)
        for place, nodes in classes:
            is_slow = _WAITS <= place < fast
            if is_slow and not cached.holders:
                continue
            allowed = (node for node in nodes if node[0] not in avoid) if avoid else nodes
            first = islice(allowed, SHORTEST_WAITS)
            chosen.update((node for node in first if cached.has(node[0])) if is_slow else first)
        if lane is self.decode:
            roomiest = self.room.roomiest(request.prompt_tokens + request.max_new_tokens)
            if roomiest is not None and roomiest.node_id not in avoid:
                chosen[roomiest.node_id] = roomiest
        looked_at: list[list[str]] | None = None
        for having in islice(cached.longest(), MOST_LENGTHS):
            # The set also holds nodes of the other pool, so twice as many are taken.
            if having.bit_count() <= 2 * MOST_CACHED:
                names = cached.names(having, 2 * MOST_CACHED, request.turn)
            else:
                if looked_at is None:
                    looked_at = [[name for name, _ in islice(each, MOST_LOOKS)] for _, each in lane.least_busy()]
                names = self._with_prefix(looked_at, having, cached, request.turn)
            for name in names:
                if name in lane.views and name not in avoid:
                    chosen[name] = lane.views[name]
        return tuple(chosen.values())

    @staticmethod
    def _with_prefix(looked_at: list[list[str]], nodes: int, cached: Overlaps, turn: int) -> Iterator[str]:
        """Yields nodes of a large set that are among the least busy of the pool."""
        found = 0
        for names in looked_at:
            for name in cached.among(names, nodes):
                yield name
                found += 1
                if found % MOST_CACHED == 0:
                    break
        if found < MOST_CACHED:
            yield from cached.names(nodes, 2 * MOST_CACHED, turn)


_List = Callable[[Shortlist, Lane, RoutingRequest, Overlaps], tuple[NodeView, ...]]
# A policy that is not named here ranks every node.
_LISTS: dict[PolicyName, _List] = {
    PolicyName.LEAST_WAIT: Shortlist._by_wait,
    PolicyName.PREFIX_AFFINITY: Shortlist._by_wait,
    PolicyName.SESSION_AFFINITY: Shortlist._by_session,
    PolicyName.ROUND_ROBIN: Shortlist._by_turn,
}
