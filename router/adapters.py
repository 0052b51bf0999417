"""Which weights of each LoRA adapter a router serves, from what the nodes in view say that they have.

The nodes of a pool take a change one after another, and the name stays known meanwhile: the router serves the earlier weights, which
nodes keep, until every node has the new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.wire.requests import NodeStatus


class ServedAdapters:
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
                (each.adapters[name], *each.replaced_adapters.get(name, ()))
                for each in nodes
                if name in each.adapters
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
