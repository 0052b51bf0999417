"""Where a request may go next: not to nodes that failed it, unless they were started again since, and once tokens of it were shown, to
none with another model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import Unavailable
from tandem.router.dispatch.ledger import TokenLedger
from tandem.router.dispatch.placement import Attempt, Placement
from tandem.router.policy.choose import Alternative
from tandem.router.policy.views import RoutingDecision, RoutingRequest
from tandem.router.prefixes import PromptHashes
from tandem.wire.nodes import NodeInfo


class NodeChoice:
    def __init__(
        self, placement: Placement[Any], spec: SequenceSpec, hashes: PromptHashes, ledger: TokenLedger
    ) -> None:
        self._placement = placement
        self._spec = spec
        self._hashes = hashes
        self._ledger = ledger
        self._avoided: set[NodeInfo] = set()
        self._left: set[NodeInfo] = (
            set()
        )  # those of them that it left because blocks were kept there, which may be over
        self._content: str | None = None  # identity of the model on the nodes of the last attempt
        self._mirror: NodeInfo | None = None  # the mirror of the decode node that failed last

    def went(self, attempt: Attempt) -> None:
        self._content = attempt.nodes[0].content

    def failed(self, attempt: Attempt | None, avoid: Iterable[NodeInfo], *, for_now: bool = False) -> None:
        """`for_now`: these nodes are avoided until the request leaves another one for the same reason."""
        if attempt is not None and attempt.decode_started:
            self._mirror = attempt.decision.mirror
        if for_now:
            self._avoided -= self._left
            self._left = {*avoid} - self._avoided
        self._avoided.update(avoid)

    def choose(self) -> RoutingDecision:
        """Raises Unavailable when no node can take the request."""
        if self._spec.facts.when_idle:
            with contextlib.suppress(Unavailable):
                return self._besides(self._failed_it(self._avoided) | self._placement.crowded())
        try:
            return self.choose_another()
        except Unavailable:
            if not (avoided := self._failed_it(self._avoided)):
                raise
            # A decode node that failed this request before is better than none. A prefill node that failed it
            # stays avoided.
            return self._besides(self._placement.prefill_ids & avoided)

    def choose_another(self) -> RoutingDecision:
        """As `choose`, but never a node that failed the request."""
        return self._besides(self._failed_it(self._avoided))

    def has_room_besides(self, node: NodeInfo) -> bool:
        routing = self._routing(self._failed_it(self._avoided - self._left) | {node.node_id})
        return self._placement.has_room(routing, self._hashes)

    def alternatives(self, decision: RoutingDecision) -> list[Alternative]:
        return self._placement.alternatives(self._routing(frozenset()), self._hashes, decision)

    def _failed_it(self, nodes: Iterable[NodeInfo]) -> frozenset[str]:
        """The names of these nodes, but for those that were started again, and of those that answered it before."""
        return self._placement.not_started_again(nodes) | self._spec.answered_by

    def _besides(self, avoid: frozenset[str]) -> RoutingDecision:
        return self._placement.choose(self._routing(avoid), self._hashes)

    def _routing(self, avoid: frozenset[str]) -> RoutingRequest:
        done = len(self._ledger.tokens)
        return RoutingRequest(
            prompt_tokens=len(self._spec.facts.prompt_token_ids) + done,
            max_new_tokens=self._spec.facts.sampling.max_tokens - done,
            session=self._spec.session,
            home=self._placement.homes.of(self._spec.facts.job_id),
            avoid=avoid,
            mirror=self._mirror,
            # Tokens that were shown came from one model content, and the answer must continue with it. Before
            # the first token any content will do.
            content=self._content if done else None,
            is_measured=not self._spec.facts.when_idle,
            makes_vector=self._spec.facts.pooling is not None,
            needs_version=self._placement.version_for(self._spec),
        )
