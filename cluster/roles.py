"""The roles of nodes, each as its package describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wings
from tandem.decode_node.role import AGGREGATED, DECODE
from tandem.prefill_node.role import PREFILL
from tandem.wire.nodes import Role

if TYPE_CHECKING:
    from tandem.node.config import NodeConfig
    from tandem.node.node import Node
    from tandem.node.roles import RoleTraits

# Each has `TRAITS`. Where its package was deleted, there are no nodes of its role.
_WINGS = ("tandem.encode_node.role",)
TRAITS: dict[Role, RoleTraits] = {
    traits.role: traits for traits in (PREFILL, DECODE, AGGREGATED, *(module.TRAITS for module in find_wings(_WINGS)))
}


def traits_of(role: Role) -> RoleTraits:
    if role not in TRAITS:
        raise ConfigurationError(f"pools.{role.value}: this installation has no nodes of this role")
    return TRAITS[role]


def make_node(config: NodeConfig) -> Node[Any]:
    return traits_of(config.role).make(config)
