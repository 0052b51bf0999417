"""From which peers this node has KV, and of which generation of their caches.

A node's cache begins a new generation when something in it may be wrong. Every message to a peer names the sender's
generation. So a node that has KV of an earlier one learns of it from whatever it hears next, and it asks its sources
again and again, so that it hears something: also after one of the two was away.
"""

from __future__ import annotations

from collections import OrderedDict

from tandem.kvtransfer.protocol.side import PeerKey
from tandem.wire.nodes import PeerAddress

ASK_S = 5.0  # between two questions to a source
MOST_SOURCES = 256  # remembered at a time; the one that was used longest ago is forgotten first


class KVSources:
    def __init__(self) -> None:
        self._of: OrderedDict[PeerKey, tuple[PeerAddress, int]] = OrderedDict()

    def took(self, peer: PeerAddress, generation: int) -> None:
        """KV of this generation of the peer's cache is here now."""
        key = PeerKey(peer.node_id, peer.epoch)
        _, before = self._of.pop(key, (peer, generation))
        self._of[key] = peer, min(before, generation)
        if len(self._of) > MOST_SOURCES:
            self._of.popitem(last=False)

    def is_outdated(self, key: PeerKey, generation: int) -> bool:
        """Whether KV is here that is of an earlier generation of this peer's cache than `generation`."""
        _, here = self._of.get(key, (None, generation))
        return here < generation

    def clear(self) -> None:
        """Nothing that came from a peer so far is used any more."""
        self._of.clear()

    @property
    def peers(self) -> list[PeerAddress]:
        return [peer for peer, _ in self._of.values()]
