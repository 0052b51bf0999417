"""Where a request goes: pure functions from a snapshot of the pools to a decision that explains itself.

views         what a policy sees and answers; expected waits, from what was measured; when the decode node should compute the prompt itself
choose        the policies by name; the nodes that share cached KV with a request's nodes; for traces, the nodes that were not chosen
shortlist     the few nodes of a large pool that a policy ranks; how many blocks the decode nodes have free
"""

from tandem.router.policy.choose import RoutingPolicy, make_policy
from tandem.router.policy.views import NodeView, PoolSnapshot, RoutingDecision, RoutingRequest

__all__ = [
    "NodeView",
    "PoolSnapshot",
    "RoutingDecision",
    "RoutingPolicy",
    "RoutingRequest",
    "make_policy",
]
