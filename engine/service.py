"""Where a node is configured (kept here for the launcher's import)."""

from engine.node_config import NodeConfig, NodeTimeouts

__all__ = ["NodeConfig", "NodeTimeouts"]
