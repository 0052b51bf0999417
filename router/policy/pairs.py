"""Which machines are far from each other: how long answers waited for the handover between two of them, and a nearer pair for a request.

Far is what takes noticeably longer than it does between the nearest. A pair that was never used counts as near, and so does one that has
not been used for long: that is how another link is found, and one that was slow for a while.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tandem.router.policy.views import (
    Average,
    NodeView,
    RoutingRequest,
    best_prefill_rate,
    decode_wait_s,
    prefill_costs_s,
)
from tandem.wire.endpoints import parse_endpoint
from tandem.wire.nodes import NodeInfo, Role

MOST_PAIRS = 10_000
HALVES_S = 60.0  # what was measured counts half after this time
NOTICED_S = 0.02  # less is not worth a change
MOST_LOOKS = 32  # nodes of each role among which a nearer one is sought
_FORGETS = 1.005  # with each handover, by how much a shorter one before it counts less
_TIMES = 4.0  # no prompt is taken for more often as long, or as short, as those that were measured


@dataclass(slots=True)
class _Measured:
    at: float
    waited_s: Average = field(default_factory=Average)
    tokens: Average = field(default_factory=Average)


class PairTimes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pairs: OrderedDict[tuple[str, str], _Measured] = OrderedDict()
        self._near_s = math.inf  # what a handover between near machines takes

    def observe(self, prefill: NodeInfo, decode: NodeInfo, tokens: int, waited_s: float) -> None:
        """An answer to a prompt of so many tokens waited between its first token and its decode node's beginning."""
        pair, now = _pair(prefill, decode), self._clock()
        self._near_s = min(waited_s, self._near_s * _FORGETS)
        known = self._pairs.setdefault(pair, _Measured(now))
        known.at = now
        known.waited_s.observe(waited_s)
        known.tokens.observe(tokens)
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MOST_PAIRS:
            self._pairs.popitem(last=False)

    def longer_s(self, prefill: NodeInfo, decode: NodeInfo, tokens: int) -> float:
        """How much longer than between near machines an answer is likely to wait for this handover; 0 between those."""
        known = self._pairs.get(_pair(prefill, decode))
        if known is None or known.waited_s.value is None or known.tokens.value is None:
            return 0.0
        likely_s = known.waited_s.value * min(_TIMES, max(1 / _TIMES, tokens / max(1.0, known.tokens.value)))
        longer_s = likely_s * 0.5 ** ((self._clock() - known.at) / HALVES_S) - self._near_s
        return longer_s if longer_s > max(NOTICED_S, self._near_s) else 0.0

    def nearer(
        self,
        chosen: tuple[NodeView, NodeView],
        prefill: Sequence[NodeView],
        decode: Sequence[NodeView],
        request: RoutingRequest,
    ) -> tuple[NodeView, NodeView] | None:
        """Returns a pair of these nodes with which the request waits less than with the one that was chosen, the handover
        included. One node of it is the chosen one."""
        tokens = request.prompt_tokens

        def longer_s(pair: tuple[NodeView, NodeView]) -> float:
            return self.longer_s(pair[0].info, pair[1].info, tokens)

        far_s = longer_s(chosen)
        if not far_s:
            return None
        near = [pair for pair in _pairs_with(chosen, prefill, decode) if longer_s(pair) + NOTICED_S < far_s]
        reads = _costs((pair[0] for pair in (chosen, *near)), request)
        assumed = best_prefill_rate(decode)

        def cost_s(pair: tuple[NodeView, NodeView]) -> float:
            return reads[pair[0].node_id] + decode_wait_s(pair[1], request, assumed) + longer_s(pair)

        best = min(near, key=cost_s, default=chosen)
        return best if cost_s(best) + NOTICED_S < cost_s(chosen) else None


def _pairs_with(
    chosen: tuple[NodeView, NodeView], prefill: Iterable[NodeView], decode: Iterable[NodeView]
) -> list[tuple[NodeView, NodeView]]:
    reader, writer = chosen
    pairs = [(reader, other) for other in islice(decode, MOST_LOOKS) if other.info.role is Role.DECODE]
    pairs += [(other, writer) for other in islice(prefill, MOST_LOOKS)]
    return [pair for pair in pairs if pair[0].node_id not in pair[1].status.left_out]


def _costs(nodes: Iterable[NodeView], request: RoutingRequest) -> dict[str, float]:
    unique = list({node.node_id: node for node in nodes}.values())
    costs = prefill_costs_s(unique, request, best_prefill_rate(unique))
    return {node.node_id: cost for node, cost in zip(unique, costs, strict=True)}


def _pair(prefill: NodeInfo, decode: NodeInfo) -> tuple[str, str]:
    return _machine(prefill.peer_endpoint), _machine(decode.peer_endpoint)


@functools.lru_cache(MOST_PAIRS)
def _machine(endpoint: str) -> str:
    parsed = parse_endpoint(endpoint)
    return parsed.host if parsed is not None else ""
