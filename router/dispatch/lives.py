"""Which request's life runs on which nodes, which one waits for a node, and which attempts ended just now; which nodes keep the last turns of
jobs; and the answers that have no life here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tandem.base.errors import TandemError
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Recalled, TokenChunk

L = TypeVar("L")  # A request's life. This module only stores it.

# How long chunks of an ended request may arrive. A node that sends later missed the Cancel.
LATE_CHUNK_S = 1.0
REMEMBERED_ENDS = 8192
REMEMBERED_JOBS = 16384


class Lives(Generic[L]):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_request_id: dict[str, L] = {}
        # In the order in which they came: when a node is lost, who waited longest looks for another first.
        self._by_node: dict[NodeInfo, dict[L, None]] = {}
        self._waiting: dict[L, None] = {}  # for a node
        self._ends: OrderedDict[str, float] = OrderedDict()  # request ids of attempts that are over

    def __len__(self) -> int:
        return len(self._by_request_id) + len(self._waiting)

    def of(self, request_id: str) -> L | None:
        return self._by_request_id.get(request_id)

    def all(self) -> list[L]:
        return [*self._by_request_id.values(), *self._waiting]

    def on(self, node: NodeInfo) -> list[L]:
        return list(self._by_node.get(node, ()))

    def num_on(self, node: NodeInfo) -> int:
        return len(self._by_node.get(node, ()))

    @property
    def waiting(self) -> list[L]:
        """Those without a node, in the order in which they lost theirs."""
        return list(self._waiting)

    def wait(self, life: L) -> None:
        self._waiting[life] = None

    def stop_waiting(self, life: L) -> None:
        self._waiting.pop(life, None)

    def begin(self, life: L, request_id: str, nodes: Sequence[NodeInfo]) -> None:
        self._by_request_id[request_id] = life
        for node in nodes:
            self._by_node.setdefault(node, {})[life] = None

    def end(self, life: L, request_id: str, nodes: Sequence[NodeInfo]) -> bool:
        """Returns False if it had ended already."""
        if self._by_request_id.pop(request_id, None) is None:
            return False
        self.remember_end(request_id)
        for node in nodes:
            there = self._by_node.get(node)
            if there is not None:
                there.pop(life, None)
                if not there:
                    del self._by_node[node]
        return True

    def remember_end(self, request_id: str) -> None:
        self._ends[request_id] = self._clock()
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def ended_just_now(self, request_id: str) -> bool:
        return self._clock() - self._ends.get(request_id, -LATE_CHUNK_S) < LATE_CHUNK_S


class JobHomes:
    """Which nodes pin the last turn of a job, as they were announced: its next turn goes there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By job: the nodes, and until when.
        self._homes: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()

    def remember(self, job_id: str, nodes: Sequence[NodeInfo], *, is_last_step: bool) -> None:
        self._homes.pop(job_id, None)
        pinning = {node.node_id: node.pin_seconds for node in nodes if node.pin_seconds}
        if pinning and not is_last_step:
            self._homes[job_id] = frozenset(pinning), self._clock() + max(pinning.values())
            if len(self._homes) > REMEMBERED_JOBS:
                self._homes.popitem(last=False)

    def of(self, job_id: str | None) -> frozenset[str]:
        """Empty when no pin is known or it has ended."""
        nodes, until = self._homes.get(job_id, (frozenset(), 0.0)) if job_id is not None else (frozenset(), 0.0)
        return nodes if self._clock() < until else frozenset()


class FollowedAnswers:
    """Answers that are read here and have no life here: nodes keep them, and other routers began them. None, unless a wing reads some.
    Told of everything that nodes say of them, on the event loop."""

    def on_recalled(self, message: Recalled) -> None:
        """A node says whether it keeps an answer."""

    def on_chunk(self, node_id: str, epoch: int, chunk: TokenChunk) -> bool:
        """Returns whether the chunk, which belongs to no life, is of an answer that is read here."""
        return False

    def on_line_broken(self, node: NodeInfo) -> None:
        """The node's messages may have been lost."""

    def on_node_lost(self, node: NodeInfo, why: str) -> None: ...

    def leave_all(self, error: TandemError) -> None:
        """This router ends."""
