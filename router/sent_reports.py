"""What router processes on one port tell each other of the requests that they send.

A node says how much it has to do four times a second. Until then a process knows what it has sent itself, and with these reports what the
others have: otherwise several send to the same node what that has cached, or has room for once.
"""

from __future__ import annotations

import msgspec

from tandem.router.choosing import Chooser
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.siblings import Siblings
from tandem.wire.nodes import NodeInfo

_SENT, _ANSWERED = "sent", "answered"


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    epoch: int
    request_id: str
    tokens: int  # to be computed there
    blocks: int  # that it may take
    marks: list[int]  # of its prompt's hashes


class _Answered(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    request_id: str


class SentReports:
    """On the event loop only."""

    def __init__(self, siblings: Siblings, pool: NodePool, chooser: Chooser) -> None:
        self._siblings = siblings
        self._pool = pool
        self._chooser = chooser
        siblings.hears[_SENT] = self._on_sent
        siblings.hears[_ANSWERED] = self._on_answered

    def tell(self, node: NodeInfo, request_id: str, tokens: int, blocks: int, hashes: PromptHashes) -> None:
        if not self._siblings.alone:
            marks = self._chooser.marks_of(hashes, node.block_size)
            self._siblings.report(_SENT, _Sent(node.node_id, node.epoch, request_id, tokens, blocks, marks))

    def _on_sent(self, desk: str, body: bytes) -> None:
        sent = msgspec.msgpack.decode(body, type=_Sent)
        member = self._pool.member(sent.node_id)
        if member is None or member.info.epoch != sent.epoch or member.lost is not None:
            return
        # Its node's next status counts it, and this is forgotten then.
        self._pool.sent(sent.node_id, sent.request_id, sent.tokens, sent.blocks)
        self._chooser.sent_elsewhere(sent.node_id, sent.marks)

    def tell_answered(self, node_id: str, request_id: str) -> None:
        """It was answered before a status counted it."""
        if not self._siblings.alone:
            self._siblings.report(_ANSWERED, _Answered(node_id, request_id))

    def _on_answered(self, desk: str, body: bytes) -> None:
        answered = msgspec.msgpack.decode(body, type=_Answered)
        self._pool.answered(answered.node_id, answered.request_id)
