"""What is asked for, once checked (`SequenceSpec`), and one try of it on one pair of nodes, or on one node, under a request id and a transfer
id of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tandem.router.policy import RoutingDecision
from tandem.router.tracing.traces import RequestTrace
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeInfo, PeerAddress
from tandem.wire.pooling import Pooling
from tandem.wire.requests import CachePeers, KeepAnswer, KVTransferParams, Submit, TransferRole, new_id
from tandem.wire.sampling import SamplingParams


class KeptAnswer(msgspec.Struct, frozen=True):
    """Its answer is kept by the node that decodes it, for any router that asks for it by this id."""

    answer_id: str
    note: bytes  # what such a router needs to make the answer of the tokens


class SequenceSpec(msgspec.Struct, frozen=True):
    label: str  # the HTTP request's id, for logs
    prompt_token_ids: list[int]
    sampling: SamplingParams  # its seed is drawn: any node goes on exactly where another stopped
    deadline: float  # on the event loop's clock
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None  # the adapter's identity: wire.adapters
    media: list[MediaFeature] = []  # where images stand in the prompt; or its `embeds`
    images: list[bytes] = []  # their files
    embeds: PromptEmbeds | None = None  # in the place of the whole prompt's tokens
    session: str | None = None
    job_id: str | None = None  # the agent's work that it is a turn of, unlike that of any other tenant
    is_last_step: bool = False  # of that job
    trace: RequestTrace | None = None
    arrived: float | None = None  # when the HTTP request came; None: now
    keep: KeptAnswer | None = None
    reads_ahead: bool = False  # the beginning of a prompt that still arrives: its one token is dropped
    pooling: Pooling | None = None  # a vector of the prompt is wanted, and no token


class TokenSource(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


# Looked up once, and not with every token.
_PREFILL, _DECODE = TokenSource


class Attempt:
    """A new request id for each attempt: a late message about an abandoned one can never be taken for this one's."""

    def __init__(self, decision: RoutingDecision, base: int, submitted_at: float, number: int = 1) -> None:
        self.decision = decision
        self.number = number  # of the request's attempts
        self.request_id = f"req-{new_id()}"
        self.base = base  # output tokens that it began with
        self.submitted_at = submitted_at
        self.sent: dict[NodeInfo, Position] = {}  # where its Submits stand on the lines to its nodes
        self.alive_at = (
            submitted_at  # it last reported a token then, or its nodes said that they have the request
        )
        self.prefill_reported = (
            False  # the prefill node's first token is here, or it said that it will send none
        )
        self.prefill_gave_up = False  # it will send none: the decode node reads the prompt itself
        self.decode_cached: int | None = None  # prompt tokens that the decode node had in its own cache
        self.decode_started = False  # the decode node has reported: it has the KV, or computed it
        self.first_token_at: float | None = None
        self.asked_at: float | None = None  # when its nodes were last asked whether they have it
        self.unanswered: set[NodeInfo] = set()  # those that were asked, until they say that they do
        self.may_differ = False  # the decode node may repeat tokens that are known, differently

    @property
    def prefill(self) -> NodeInfo | None:
        return self.decision.prefill

    @property
    def decode(self) -> NodeInfo | None:
        return self.decision.decode

    @property
    def nodes(self) -> list[NodeInfo]:
        return [node for node in (self.decision.prefill, self.decision.decode) if node is not None]

    def node(self, source: TokenSource) -> NodeInfo | None:
        return self.decode if source is TokenSource.DECODE else self.prefill

    def source(self, node_id: str, epoch: int) -> TokenSource | None:
        """Which of its nodes speaks; None when neither does."""
        decode, prefill = self.decision.decode, self.decision.prefill
        if decode is not None and decode.node_id == node_id and decode.epoch == epoch:
            return _DECODE
        if prefill is not None and prefill.node_id == node_id and prefill.epoch == epoch:
            return _PREFILL
        return None

    def submits(
        self,
        spec: SequenceSpec,
        tokens: list[int],
        reply_to: str,
        timeout_s: float,
        encoders: Sequence[NodeInfo] = (),
    ) -> list[tuple[NodeInfo, Submit]]:
        """The decode node's first: it reserves and registers while the prefill node's message is on its way. `encoders`: for each image,
        told to the node that reads the prompt."""
        prefill, decode = self.prefill, self.decode
        source, mirror = _tier(self.decision.source), _tier(self.decision.mirror)
        cache_peers = CachePeers(source, mirror) if source or mirror else None

        addresses = [PeerAddress(node.node_id, node.epoch, node.peer_endpoint) for node in encoders]

        def submit(transfer: KVTransferParams | None) -> Submit:
            keep = None
            if spec.keep is not None:
                # The prefill node of two only has to go on without this router.
                is_sent_away = transfer is not None and transfer.role is TransferRole.PRODUCE
                note = b"" if is_sent_away else spec.keep.note
                keep = KeepAnswer(spec.keep.answer_id, self.number, note)
            reads_prompt = transfer is None or transfer.role is TransferRole.PRODUCE
            return submit_of(
                spec,
                self.request_id,
                reply_to,
                timeout_s,
                tokens,
                transfer,
                keep,
                cache_peers,
                addresses if reads_prompt else (),
            )

        if prefill is None or decode is None:
            return [(node, submit(None)) for node in self.nodes]

        transfer_id = f"kv-{new_id()}"

        def transfer(role: TransferRole, peer: NodeInfo) -> KVTransferParams:
            return KVTransferParams(
                transfer_id, role, PeerAddress(peer.node_id, peer.epoch, peer.peer_endpoint)
            )

        return [
            (decode, submit(transfer(TransferRole.CONSUME, prefill))),
            (prefill, submit(transfer(TransferRole.PRODUCE, decode))),
        ]


def submit_of(
    spec: SequenceSpec,
    request_id: str = "",
    reply_to: str = "",
    timeout_s: float = 0.0,
    tokens: Sequence[int] = (),
    transfer: KVTransferParams | None = None,
    keep: KeepAnswer | None = None,
    cache_peers: CachePeers | None = None,
    encoders: Sequence[PeerAddress] = (),
) -> Submit:
    """What a node is told of the request; with the defaults, what is the same for every attempt and node."""
    return Submit(
        request_id=request_id,
        reply_to=reply_to,
        prompt_token_ids=spec.prompt_token_ids,
        sampling=spec.sampling,
        timeout_s=timeout_s,
        output_token_ids=list(tokens),
        transfer=transfer,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        lora=spec.lora,
        media=spec.media,
        images=spec.images,
        embeds=spec.embeds,
        trace=spec.trace is not None,
        keep=keep,
        cache_peers=cache_peers,
        pooling=spec.pooling,
        job_id=spec.job_id,
        is_last_step=spec.is_last_step,
        encoders=list(encoders),
    )


def _tier(node: NodeInfo | None) -> PeerAddress | None:
    return None if node is None else PeerAddress(node.node_id, node.epoch, node.tier_endpoint)
