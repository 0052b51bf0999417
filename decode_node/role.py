"""What a cluster does for decode nodes, and for aggregated ones."""

from tandem.node.roles import RoleTraits
from tandem.wire.nodes import Role

DECODE = RoleTraits(
    role=Role.DECODE,
    node="tandem.decode_node.node:DecodeNode",
    actor="tandem.decode_node.actor:DecodeActor",
    task="decode",
    nodes=1,
    reads_prompts=False,
)
AGGREGATED = RoleTraits(role=Role.AGGREGATED, node=DECODE.node, actor=DECODE.actor, task="do both")
