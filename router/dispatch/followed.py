"""Answers that are read here and have no life here: nodes keep them, and other routers began them."""

from __future__ import annotations

from tandem.base.errors import TandemError
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Recalled, TokenChunk


class FollowedAnswers:
    """None, unless a wing reads some. Told of everything that nodes say of them, on the event loop."""

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
