"""Which generation of its cache each producer's KV is of, and which producers must hear that theirs was wrong."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kvtransfer.protocol.links import ProducerLinks
from tandem.kvtransfer.protocol.side import BoundedMemory, NodeSide, PeerKey, key_of
from tandem.kvtransfer.sources import ASK_S
from tandem.wire.handoff import Envelope, RenewLease
from tandem.wire.nodes import PeerAddress

MOST_ACCUSED = 16  # producers are told again and again, until they confirm, that KV of theirs was wrong


class SourceGenerations:
    def __init__(self, side: NodeSide, links: ProducerLinks, distrusted: Callable[[str], None]) -> None:
        """`distrusted` is called with the reason why nothing that is cached here may be used again."""
        self._side = side
        self._links = links
        self._distrusted = distrusted
        self._sources = side.sources.handed_over
        self._asked_at = side.clock() - ASK_S
        # Producers that have not confirmed yet that KV of theirs was found wrong, and how often it was.
        self.accused: dict[PeerKey, tuple[PeerAddress, int]] = {}
        # For longer than a producer remembers what it has heard late: else it would take the next time for one that it knows.
        self._found_wrong: BoundedMemory[int] = BoundedMemory(
            side.settings.max_remembered, 2 * side.settings.keep_link_s, side.clock
        )

    @property
    def awaits_confirmation(self) -> bool:
        return self._sources.awaits_confirmation

    def took(self, peer: PeerAddress, generation: int) -> None:
        """KV of this generation of the peer's cache is about to be used here."""
        self._sources.took(peer, generation)

    def begin(self) -> None:
        """A new generation of our own cache begins: nothing of a peer is in it."""
        self._sources.clear()

    def found_wrong(self, peer: PeerAddress) -> None:
        """What this producer handed over was computed wrongly. It counts as bytes that arrived wrong do."""
        key = PeerKey(peer.node_id, peer.epoch)
        times = (self._found_wrong.get(key) or 0) + 1
        self._found_wrong.add(key, times)
        self.accused[key] = peer, times
        self._side.recorder.wrong_kv(peer.node_id)
        self._links.found_wrong(key)
        self._ask(peer)

    def confirmed(self, key: PeerKey, times: int) -> None:
        """The producer says how often it has heard that KV of its was wrong."""
        _, told = self.accused.get(key, (None, 0))
        if told and times >= told:
            del self.accused[key]

    def hear(self, envelope: Envelope) -> bool:
        """Returns whether it is news that the sender distrusts what it handed over."""
        key = key_of(envelope)
        is_news = self._sources.hear(key, envelope.generation)
        if is_news:
            self.distrust(f"{key.node_id} distrusts its own cache, from which KV was received")
        return is_news

    def distrust(self, reason: str) -> None:
        self._sources.clear()  # the engine gives up everything
        self._distrusted(reason)

    @property
    def seconds_until_ask(self) -> float:
        return max(0.0, self._asked_at + ASK_S - self._side.clock())

    def ask_all(self) -> None:
        """Asks every node that KV has come from for a sign, so that we hear of a new generation of its cache."""
        if self.seconds_until_ask > 0:
            return
        self._asked_at = self._side.clock()
        accused = [peer for peer, _ in self.accused.values()][-MOST_ACCUSED:]
        for peer in dict.fromkeys([*self._sources.to_ask(), *accused]):
            self._ask(peer)

    def _ask(self, peer: PeerAddress) -> None:
        key = PeerKey(peer.node_id, peer.epoch)
        _, times = self.accused.get(key, (peer, 0))
        link = self._links.get(key)
        stamp = link.stamp if link is not None else 0
        self._side.send(peer.endpoint, RenewLease(self._side.me.envelope(peer.epoch), stamp, [], times))
