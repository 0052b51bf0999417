"""What a cluster does differently for the nodes of one role. The package of each role's node says it, in its role.py."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.node.config import NodeConfig
from tandem.wire.nodes import Role

if TYPE_CHECKING:
    from tandem.node.node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    role: Role
    node: str  # the module and class of its node
    actor: str  # of its Ray actor
    task: str  # completes "nodes that ..."
    nodes: int = 0  # the default size of its pool
    is_scaled: bool = True  # by its load, if its pool has a `max`
    reads_prompts: bool = True  # or only what is too short to be worth sending away
    one_rank: str = ""  # why its nodes cannot have several ranks; "": they can
    fixed: str = ""  # why its nodes cannot change their role, and no node can become one; "": they can

    def make(self, config: NodeConfig) -> Node[Any]:
        """Called in the node's own process: the import takes seconds."""
        node: Node[Any] = _named(self.node)(config)
        return node

    def find_actor(self) -> Any:
        return _named(self.actor)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
