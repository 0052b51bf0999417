"""What a cluster does for encoder nodes."""

from tandem.node.roles import RoleTraits
from tandem.wire.nodes import Role

TRAITS = RoleTraits(
    role=Role.ENCODE,
    node="tandem.encode_node.node:EncodeNode",
    actor="tandem.encode_node.actor:EncodeActor",
    task="encode images",
    is_scaled=False,
    one_rank="a vision tower is not divided among ranks",
    fixed="an encoder node has only a vision tower, so its role cannot change, and no other node can become one",
)
