"""What a node knows of the nodes whose tiers it copies from: whether they give what is right, and whether copying is faster than
computing."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.kvtransfer.offload.fetches import KnownPeer, Rate
from tandem.kvtransfer.protocol.checksums import every_of
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import BoundedMemory, PeerKey, Recorder
from tandem.wire.nodes import PeerAddress

logger = logging.getLogger(__name__)

# A step with fewer prompt tokens than this is mostly fixed cost, so it does not count as a measurement.
LEAST_PROMPT_TOKENS = 64
MAX_PEERS = 64  # the most peers that are remembered


class TierPeers:
    def __init__(
        self, recorder: Recorder, chunk_bytes: int, checksums: ChecksumPolicy, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._chunk_bytes = chunk_bytes
        self._checksums = checksums
        self._clock = clock
        # A node is left out after as many wrong copies as in transfers.
        limits = ProtocolSettings.from_config(TransferConfig())
        self._max_wrong, self._doubt_s = limits.max_wrong, limits.keep_link_s
        self._wrong: BoundedMemory[int] = BoundedMemory(MAX_PEERS, self._doubt_s, clock)
        self._known: OrderedDict[PeerKey, KnownPeer] = OrderedDict()
        self._computing = Rate(clock)  # prompt tokens
        self._planned: deque[tuple[int, float]] = deque(maxlen=8)  # steps that are not booked yet
        self._booked_at = 0.0

    def of(self, key: PeerKey) -> KnownPeer:
        peer = self._known.pop(key, None) or KnownPeer(Rate(self._clock), Rate(self._clock))
        self._known[key] = peer
        if len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)
        return peer

    def hear(self, key: PeerKey, generation: int) -> None:
        if (peer := self._known.get(key)) is not None:
            peer.generation = max(peer.generation, generation)

    # ── what computing takes ──

    def planned(self, prompt_tokens: int) -> None:
        self._planned.append((prompt_tokens, self._clock()))

    def booked(self) -> None:
        """The oldest planned step has been booked."""
        now = self._clock()
        tokens, planned_at = self._planned.popleft() if self._planned else (0, now)
        if tokens >= LEAST_PROMPT_TOKENS:
            self._computing.observe(tokens, now - max(planned_at, self._booked_at))
        self._booked_at = now

    def are_worth_it(self, source: PeerAddress, chunks: int, tokens: int, *, answers: int = 1) -> bool:
        """Whether the chunks arrive, after the answers, before the tokens are computed. True if a rate is unknown."""
        peer = self.of(PeerKey(source.node_id, source.epoch))
        rate, asking, computing = peer.bytes_per_s.value, peer.answers_per_s.value, self._computing.value
        if rate is None or asking is None or computing is None:
            return True
        return answers / asking + chunks * self._chunk_bytes / rate < tokens / computing

    # ── whether they are right ──

    def checksum_every(self, peer: PeerAddress) -> int | None:
        """Returns n if one of n chunks is compared; None if nothing is copied from this peer for now."""
        times_wrong = self._wrong.get(peer.node_id) or 0
        if times_wrong >= self._max_wrong:
            return None
        return every_of(self._checksums, is_doubtful=times_wrong > 0)

    def was_wrong(self, node_id: str, problem: str) -> None:
        logger.error("copying from the tier of %s: %s; none of it is used", node_id, problem)
        self._recorder.wrong_kv(node_id)
        times = (self._wrong.get(node_id) or 0) + 1
        self._wrong.add(node_id, times)
        if times >= self._max_wrong:
            self._recorder.left_out(node_id, self._clock() + self._doubt_s)
