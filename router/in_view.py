"""The nodes that may get requests, by their model's content, and what their requests may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tandem.router.member import Member
from tandem.router.policy.shortlist import Shortlist
from tandem.router.policy.views import PoolSnapshot, best_prefill_rate, first_by_rendezvous
from tandem.wire.nodes import NodeInfo
from tandem.wire.pooling import VectorModel
from tandem.wire.requests import NodeStatus


class ServedAdapters:
    """Which weights of each LoRA adapter a router serves, from what the nodes in view say that they have. The nodes of a pool take a
    change one after another, and the name stays known meanwhile: the router serves the earlier weights, which nodes keep, until every
    node has the new ones."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}  # the digests that were served last, by name

    def forget(self, name: str) -> None:
        """A node has unloaded it, so new requests do not get it, although other nodes have it still."""
        self._latest.pop(name, None)

    def of(self, nodes: Sequence[NodeStatus]) -> Mapping[str, str]:
        """Returns the digests by name. While no node is in view, the last ones: their requests wait like the model's own."""
        if nodes:
            self._latest = self._served(nodes)
        return self._latest

    def _served(self, nodes: Sequence[NodeStatus]) -> dict[str, str]:
        first = nodes[0].adapters
        if all(each.adapters == first for each in nodes):
            return dict(first)
        served: dict[str, str] = {}
        for name in dict.fromkeys(name for each in nodes for name in each.adapters):
            held = [
                (each.adapters[name], *each.replaced_adapters.get(name, ())) for each in nodes if name in each.adapters
            ]
            # A name that was never served is being loaded. One that was is served by the nodes that have it.
            if len(held) == len(nodes) or name in self._latest:
                served[name] = _chosen(held, self._latest.get(name))
        return served


def _chosen(held: Sequence[Sequence[str]], latest: str | None) -> str:
    """`held`: what each node that serves the name has of it, the newest first. `latest`: what this router served last, which a router that
    has just started does not know."""
    if all(has[0] == held[0][0] for has in held):
        return held[0][0]
    everywhere = [digest for digest in held[0] if all(digest in has for has in held)]
    if latest in everywhere:
        return latest
    # A node that joined without the latest must not take the others back to what the latest replaced.
    newer = [digest for digest in everywhere if latest is None or not _replaced_by(digest, latest, held)]
    if newer:
        return newer[0]
    if latest is not None and any(latest in has for has in held):
        return latest
    return Counter(has[0] for has in held).most_common(1)[0][0]


def _replaced_by(digest: str, other: str, held: Sequence[Sequence[str]]) -> bool:
    return any(other in has and digest in has[has.index(other) + 1 :] for has in held)


class NodesInView:
    """There are two contents while a cluster moves to another one; all nodes of a request have the same content."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """`members` has those that are not in view, too."""
        self._members = members
        self._shortlists: dict[str, Shortlist] = {}
        self._encoders: dict[str, dict[str, NodeInfo]] = {}  # the encoder nodes, by content and their ids
        self._snapshot: PoolSnapshot | None = None
        self._max_model_len: int | None = None
        self._knows_max_model_len = False
        self._adapters: Mapping[str, str] | None = None  # None: must be computed again
        self._served_adapters = ServedAdapters()

    def put(self, member: Member) -> None:
        info = member.info
        if member.is_in_view:
            member.file()
            return
        member.is_in_view = True
        if info.role.runs_requests:
            member.shortlist = self._shortlists.setdefault(info.content, Shortlist())
            member.file()
        else:
            self._encoders.setdefault(info.content, {})[info.node_id] = info
        self.changed()

    def drop(self, member: Member) -> None:
        if not member.is_in_view:
            return
        info, shortlist = member.info, member.shortlist
        member.is_in_view, member.shortlist = False, None
        if (there := self._encoders.get(info.content)) is not None:
            there.pop(info.node_id, None)
            if not there:
                del self._encoders[info.content]
        if shortlist is not None:
            shortlist.drop(member)
            if not shortlist.decode.views and not shortlist.prefill.views:
                del self._shortlists[info.content]
        self.changed()

    def changed(self) -> None:
        """What was found of all nodes must be found again."""
        self._snapshot = None
        self._knows_max_model_len = False
        self._adapters = None

    def adapters_changed(self, gone: Iterable[str]) -> None:
        """A node's adapters are others now; `gone` it serves no longer."""
        self._adapters = None
        for name in gone:
            self._served_adapters.forget(name)

    def max_model_len(self) -> int | None:
        """The shortest context length of the nodes in view, or of all members while none is in view."""
        if not self._knows_max_model_len:
            members = [each for each in self._members.values() if each.info.role.runs_requests]
            infos = [member.info for member in members if member.is_in_view]
            infos = infos or [member.info for member in members]
            self._max_model_len = min((info.max_model_len for info in infos), default=None)
            self._knows_max_model_len = True
        return self._max_model_len

    def vectors(self) -> VectorModel | None:
        """How the members' model makes vectors. Nodes that work together have one model, so any node's word
        will do."""
        views = self.snapshot().prompt_readers
        infos = [view.info for view in views] or [member.info for member in self._members.values()]
        return next((info.vectors for info in infos if info.role.runs_requests), None)

    def adapters(self) -> Mapping[str, str]:
        """The digests, by name, of the LoRA adapters that new requests may name."""
        if self._adapters is None:
            views = self.snapshot()
            of_nodes = {view.info.node_id: view.status for view in (*views.prefill, *views.decode)}
            self._adapters = self._served_adapters.of(list(of_nodes.values()))
        return self._adapters

    def snapshot(self) -> PoolSnapshot:
        """Returns every node in view."""
        if self._snapshot is None:
            every = [each.every_node(None) for each in self._shortlists.values()]
            self._snapshot = PoolSnapshot(
                tuple(view for nodes in every for view in nodes.prefill),
                tuple(view for nodes in every for view in nodes.decode),
            )
        return self._snapshot

    def encoders_for(self, content: str, digests: Iterable[str]) -> list[NodeInfo]:
        """Returns an encoder node in view for each image; an empty list when there are none. The same image
        goes to the same node while it is in view, because that node has the image's rows."""
        there = self._encoders.get(content)
        if not there:
            return []
        return [there[first_by_rendezvous(there, digest)] for digest in digests]

    def shortlist_of(self, content: str) -> Shortlist:
        """Returns the nodes in view whose model has this content."""
        return self._shortlists.get(content) or Shortlist()

    def content_for(self, turn: int, *, vector: bool) -> str:
        """Returns the content that a new request runs on. Contents get requests in proportion to the nodes
        that could take them."""
        if len(self._shortlists) < 2:
            return next(iter(self._shortlists), "")
        able: list[str] = []
        for content, shortlist in self._shortlists.items():
            nodes = shortlist.every_node(None)
            able += [content] * len(nodes.prompt_readers if vector else nodes.decode)
        return able[turn % len(able)] if able else next(iter(self._shortlists))

    def has_room(self, tokens: int, promised: int) -> bool:
        """Whether a decode node has the blocks for a sequence of `tokens`, after the `promised` tokens of
        admitted sequences."""
        return any(each.room.has_room(tokens, promised) for each in self._shortlists.values())

    def has_room_for_vector(self, tokens: int, promised: int) -> bool:
        """The same for the nodes that make vectors."""
        readers = self.snapshot().prompt_readers
        if not any(view.has_room(tokens) for view in readers):
            return False
        return promised == 0 or promised + tokens <= sum(view.room_tokens for view in readers)

    def line_wait_s(self) -> float:
        """About how long a prompt that arrives now waits on a node before it is begun."""
        return min((each.line_wait_s() for each in self._shortlists.values()), default=0.0)

    def read_tokens_per_s(self) -> float:
        """How many tokens all nodes that read prompts read together."""
        return sum([each.read_tokens_per_s() for each in self._shortlists.values()])

    def reading_s(self, tokens: float) -> float:
        """How long one of them reads so many tokens."""
        rates = [rate for each in self._shortlists.values() if (rate := best_prefill_rate(each.readers))]
        return tokens / max(rates) if rates else 0.0

    @property
    def prefill_ids(self) -> frozenset[str]:
        return frozenset(name for each in self._shortlists.values() for name in each.prefill.views)

    @property
    def decode_count(self) -> int:
        """The number of decode and aggregated nodes in view."""
        return sum([len(each.decode.views) for each in self._shortlists.values()])
