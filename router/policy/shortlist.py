"""The few nodes of a pool among which a policy's choice is, kept ready while nodes report and requests are sent.

Ranking every node for every request would cost more with each node. So nodes are filed by how long a request would wait there:
by about how long, apart for each class of about the same speed, because the prompt's own time differs between these.
The shortlist is the first of each class, the nodes that have most of the prompt cached, and where there is most room; a policy
ranks these as it would rank all.

How much room the decode nodes have for new requests is kept up to date with each of them, too (`Room`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import log2
from typing import Protocol

from tandem.router.config import PolicyName
from tandem.router.policy.costs import ASSUMED_PREFILL_TOKENS_PER_S, ASSUMED_STEP_S, line_wait_s
from tandem.router.policy.types import NodeSnapshot, PoolSnapshot, RoutingRequest, first_by_rendezvous
from tandem.wire.nodes import NodeInfo, Role


class _Alike:
    """Nodes where a request takes equally many blocks."""

    def __init__(self) -> None:
        self.views: dict[str, NodeSnapshot] = {}
        self.blocks: dict[str, int] = {}  # that are free there and that no request there is expected to take
        # No node has more. The one that had so many may have fewer now.
        self._most = 0
        self._roomiest = ""

    def put(self, view: NodeSnapshot, blocks: int) -> None:
        node_id = view.info.node_id
        self.views[node_id] = view
        self.blocks[node_id] = blocks
        if blocks >= self._most:
            self._most, self._roomiest = blocks, node_id

    def drop(self, node_id: str) -> None:
        self.views.pop(node_id, None)
        self.blocks.pop(node_id, None)

    def roomiest(self, needed: int) -> NodeSnapshot | None:
        """A node with as many blocks. One that has the most is only looked for when the last one has too few."""
        if needed > self._most:
            return None
        if self.blocks.get(self._roomiest, -1) < needed:
            self._roomiest = max(self.blocks, key=self.blocks.__getitem__, default="")
            self._most = max(0, self.blocks.get(self._roomiest, 0))
            if self.blocks.get(self._roomiest, -1) < needed:
                return None
        return self.views[self._roomiest]


class Room:
    def __init__(self) -> None:
        self._alike: dict[tuple[int, bool, int], _Alike] = {}
        self._of_node: dict[str, _Alike] = {}
        self._idle: set[str] = set()  # nodes without work, which take any request

    def put(self, view: NodeSnapshot, is_idle: bool, blocks: int) -> None:
        info = view.info
        node_id = info.node_id
        alike = self._of_node.get(node_id)
        if alike is None:
            geometry = (info.block_size, info.keeps_tokens, info.state_blocks)
            alike = self._of_node[node_id] = self._alike.setdefault(geometry, _Alike())
        alike.put(view, blocks)
        if is_idle:
            self._idle.add(node_id)
        elif node_id in self._idle:
            self._idle.remove(node_id)

    def drop(self, node_id: str) -> None:
        self._idle.discard(node_id)
        if (alike := self._of_node.pop(node_id, None)) is not None:
            alike.drop(node_id)

    def roomiest(self, tokens: int) -> NodeSnapshot | None:
        """A node that has the blocks for so many tokens."""
        for alike in self._alike.values():
            for view in alike.views.values():
                found = alike.roomiest(view.info.blocks_for(tokens))
                if found is not None:
                    return found
                break
        return None

    def has_room(self, tokens: int, promised: int) -> bool:
        """Whether a node has the blocks for a sequence of `tokens`, beside all those that were let in and are not sent yet."""
        if not self._idle and self.roomiest(tokens) is None:
            return False
        if promised == 0:
            return True
        room = sum(view.room_tokens for alike in self._alike.values() for view in alike.views.values())
        return promised + tokens <= room


# So many nodes are taken from every class of speeds, and from the nodes that have equally much of the prompt cached.
SHORTEST_WAITS, MOST_CACHED = 5, 3
# So many lengths of cached prefixes are looked at, and so many nodes in search of those that have one and little to do.
MOST_LENGTHS, MOST_LOOKS = 4, 48
# Waits are told apart to a sixteenth of a doubling, speeds to a half.
_WAIT_STEPS, _SPEED_STEPS = 16, 2
_SHORTEST_WAIT_S = 0.0005
_WAITS = 1024  # places for waits in a class of speeds


def _place_of(wait_s: float) -> int:
    return min(_WAITS - 1, int(_WAIT_STEPS * log2(1.0 + wait_s / _SHORTEST_WAIT_S))) if wait_s > 0.0 else 0


class CachedPrefixes(Protocol):
    """Which nodes have how much of one prompt cached."""

    def tokens(self, node: NodeInfo) -> int: ...
    def longest(self) -> Iterator[int]: ...
    def has_bit(self, node_id: str, nodes: int) -> bool: ...
    def names(self, nodes: int, most: int, turn: int) -> Iterator[str]: ...


class Lane:
    """The nodes of one pool. A node's place is its class of speed, and in this its wait: the lower the number, the sooner."""

    def __init__(self) -> None:
        self.views: dict[str, NodeSnapshot] = {}
        self._place: dict[str, int] = {}
        self._there: dict[int, dict[str, None]] = {}  # at a place, the longest unchanged first
        self._places: list[int] = []  # in order, those where there is a node
        self._by_name: list[str] | None = None

    def put(self, view: NodeSnapshot, place: int) -> None:
        node_id = view.info.node_id
        self.views[node_id] = view
        old = self._place.get(node_id)
        # What a step more or less means is seen when the shortlist is ranked. A node without work is one, and no other is.
        if old is not None and -1 <= place - old <= 1 and place % _WAITS and old % _WAITS:
            return
        if old == place:
            return
        if old is None:
            self._by_name = None
        else:
            self._leave(node_id, old)
        self._place[node_id] = place
        there = self._there.get(place)
        if there is None:
            self._there[place] = {node_id: None}
            insort(self._places, place)
        else:
            there[node_id] = None

    def drop(self, node_id: str) -> None:
        place = self._place.pop(node_id, None)
        if place is not None:
            self._leave(node_id, place)
            del self.views[node_id]
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

    def least_busy(self) -> Iterator[Iterator[str]]:
        """For every class of speeds, its nodes in the order of their waits."""
        places, there, first = self._places, self._there, 0
        while first < len(places):
            end = bisect_left(places, (places[first] // _WAITS + 1) * _WAITS, first)
            yield (node_id for place in places[first:end] for node_id in there[place])
            first = end

    def pick(self, names: Iterable[str]) -> tuple[NodeSnapshot, ...]:
        views = self.views
        return tuple([views[name] for name in names])

    def at_home(self, listed: tuple[NodeSnapshot, ...], request: RoutingRequest) -> tuple[NodeSnapshot, ...]:
        """The home of the request's job is ranked too, if it is here."""
        there = {view.node_id for view in listed}
        names = (name for name in request.home if name in self.views and name not in there)
        return (*listed, *self.pick(names))


class Shortlist:
    def __init__(self) -> None:
        self.prefill, self.decode = Lane(), Lane()
        self.room = Room()

    def put(self, view: NodeSnapshot) -> None:
        """A node that requests may go to, as it is now."""
        info, status, rates = view.info, view.status, view.rates
        role, rate = info.role, rates.prefill_tokens_per_s
        wait = (status.waiting_tokens + view.pending_tokens) / (rate or ASSUMED_PREFILL_TOKENS_PER_S)
        # A decode node reads no prompts that others could read faster.
        speed = 0 if rate is None or role is Role.DECODE else int(_SPEED_STEPS * log2(rate)) + 1
        if role is Role.PREFILL:
            self.prefill.put(view, speed * _WAITS + _place_of(wait))
            return
        load = status.running + status.waiting + view.pending_requests
        wait += load * (rates.step_s or ASSUMED_STEP_S)
        self.decode.put(view, speed * _WAITS + _place_of(wait))
        self.room.put(view, load == 0, status.room_blocks - status.wanted_blocks - view.pending_blocks)

    def drop(self, info: NodeInfo) -> None:
        """It gets no new requests. Not an error for a node that is not here."""
        if info.role is Role.PREFILL:
            self.prefill.drop(info.node_id)
        else:
            self.decode.drop(info.node_id)
            self.room.drop(info.node_id)

    def every_node(self, handover_s: float | None) -> PoolSnapshot:
        return PoolSnapshot(tuple(self.prefill.views.values()), tuple(self.decode.views.values()), handover_s)

    def line_wait_s(self) -> float:
        """Until a prompt that comes now is begun, at a node that reads prompts for others; where there is none, at one that decodes."""
        lane = self.prefill if self.prefill.views else self.decode
        first = [next(names) for names in lane.least_busy()]
        return min((line_wait_s(view) for view in lane.pick(first)), default=0.0)

    def of(
        self, policy: PolicyName, request: RoutingRequest, cached: CachedPrefixes, handover_s: float | None
    ) -> PoolSnapshot:
        """What `policy` would choose among all it finds here, or one that keeps the request about as short a time waiting."""
        listed = _LISTS.get(policy)
        if listed is None:
            return self.every_node(handover_s)
        decode = listed(self, self.decode, request, cached)
        if any(view.status.left_out for view in decode):  # some prefill nodes will not do
            return self.every_node(handover_s)
        prefill = listed(self, self.prefill, request, cached)
        if request.home:
            prefill, decode = self.prefill.at_home(prefill, request), self.decode.at_home(decode, request)
        return PoolSnapshot(prefill, decode, handover_s)

    def _by_turn(
        self, lane: Lane, request: RoutingRequest, cached: CachedPrefixes
    ) -> tuple[NodeSnapshot, ...]:
        names = lane.names
        turns = (names[(request.turn + i) % len(names)] for i in range(len(names)))
        return lane.pick(dict.fromkeys(islice((name for name in turns if name not in request.avoid), 1)))

    def _by_session(
        self, lane: Lane, request: RoutingRequest, cached: CachedPrefixes
    ) -> tuple[NodeSnapshot, ...]:
        if request.session is None:
            return self._by_wait(lane, request, cached)
        names = [name for name in lane.names if name not in request.avoid]
        return lane.pick({first_by_rendezvous(names, request.session): None}) if names else ()

    def _by_wait(
        self, lane: Lane, request: RoutingRequest, cached: CachedPrefixes
    ) -> tuple[NodeSnapshot, ...]:
        avoid = request.avoid
        chosen: dict[str, None] = {}
        for names in lane.least_busy():
            first = islice((name for name in names if name not in avoid) if avoid else names, SHORTEST_WAITS)
            chosen.update(dict.fromkeys(first))
        if lane is self.decode:
            roomiest = self.room.roomiest(request.prompt_tokens + request.max_new_tokens)
            if roomiest is not None and roomiest.node_id not in avoid:
                chosen[roomiest.node_id] = None
        for nodes in islice(cached.longest(), MOST_LENGTHS):
            for name in self._with_prefix(lane, nodes, cached, request.turn):
                if name in lane.views and name not in avoid:
                    chosen[name] = None
        return lane.pick(chosen)

    def _with_prefix(self, lane: Lane, nodes: int, cached: CachedPrefixes, turn: int) -> Iterator[str]:
        """Those of `nodes` that have the least to do. With many more than are wanted, those among the least busy of the pool."""
        if nodes.bit_count() <= 2 * MOST_CACHED:  # those of the other pool are among them
            yield from cached.names(nodes, 2 * MOST_CACHED, turn)
            return
        found = 0
        for names in lane.least_busy():
            for name in islice(names, MOST_LOOKS):
                if cached.has_bit(name, nodes):
                    yield name
                    found += 1
                    if found % MOST_CACHED == 0:
                        break
        if found < MOST_CACHED:
            yield from cached.names(nodes, 2 * MOST_CACHED, turn)


_List = Callable[[Shortlist, Lane, RoutingRequest, CachedPrefixes], tuple[NodeSnapshot, ...]]
# A policy that is not named here ranks every node.
_LISTS: dict[PolicyName, _List] = {
    PolicyName.LEAST_WAIT: Shortlist._by_wait,
    PolicyName.PREFIX_AFFINITY: Shortlist._by_wait,
    PolicyName.SESSION_AFFINITY: Shortlist._by_session,
    PolicyName.ROUND_ROBIN: Shortlist._by_turn,
}
