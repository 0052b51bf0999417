"""Where a request goes: pure functions from a snapshot of the pools to a decision that explains itself."""

from router.policy.choose import Policy, make_policy
from router.policy.types import Decision, NodeView, PoolSnapshot, RoutingRequest

__all__ = ["Decision", "NodeView", "Policy", "PoolSnapshot", "RoutingRequest", "make_policy"]
