"""What a cluster does for prefill nodes."""

from tandem.node.roles import RoleTraits
from tandem.wire.nodes import Role

PREFILL = RoleTraits(
    role=Role.PREFILL,
    node="tandem.prefill_node.node:PrefillNode",
    actor="tandem.prefill_node.actor:PrefillActor",
    task="compute prompts",
    nodes=1,
)
