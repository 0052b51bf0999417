"""What each process sends to nodes, told to its siblings, so that all decide alike.

A node reports its work four times a second. In between, a process knows what it has sent itself, and by these
reports what its siblings have sent. Without them, several processes would send their requests to the same
node, because it has a prefix cached or has room for one request.
"""

from __future__ import annotations

import msgspec

from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.siblings import SentReports, Siblings
from tandem.wire.nodes import NodeInfo

_SENT, _ANSWERED = "sent", "answered"


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    epoch: int
    request_id: str
    tokens: int  # prompt tokens to compute there
    blocks: int  # blocks that it may take
    marks: list[int]  # the prompt's hashes at marked places


class _Answered(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    request_id: str


class SiblingReports(SentReports):
    """Also counts what siblings send. Runs on the event loop only."""

    def __init__(self, siblings: Siblings, pool: NodePool, chooser: Chooser) -> None:
        self._siblings = siblings
        self._pool = pool
        self._chooser = chooser
        siblings.hears[_SENT] = self._on_sent
        siblings.hears[_ANSWERED] = self._on_answered

    def tell(self, node: NodeInfo, request_id: str, tokens: int, blocks: int, hashes: PromptHashes) -> None:
        marks = self._chooser.marks_of(hashes, node.block_size)
        self._siblings.report(_SENT, _Sent(node.node_id, node.epoch, request_id, tokens, blocks, marks))

    def _on_sent(self, desk: str, body: bytes) -> None:
        sent = msgspec.msgpack.decode(body, type=_Sent)
        member = self._pool.member(sent.node_id)
        if member is None or member.info.epoch != sent.epoch or member.lost is not None:
            return
        # Counted here until the node's next status counts it.
        self._pool.sent(sent.node_id, sent.request_id, sent.tokens, sent.blocks)
        self._chooser.sent_elsewhere(sent.node_id, sent.marks)

    def tell_answered(self, node_id: str, request_id: str) -> None:
        self._siblings.report(_ANSWERED, _Answered(node_id, request_id))

    def _on_answered(self, desk: str, body: bytes) -> None:
        answered = msgspec.msgpack.decode(body, type=_Answered)
        self._pool.answered(answered.node_id, answered.request_id)
