"""Where a request goes: pure functions from a snapshot of the pools to a decision that explains itself.

views         what a policy sees, and what it answers; expected waits, from what was measured; when the decode node had better compute the prompt itself
choose        the policies by name; which other nodes have to do with a request's KV; for traces, the nodes that were not chosen
shortlist     the few nodes of a large pool that a choice is among; room: what the decode nodes have blocks for
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
