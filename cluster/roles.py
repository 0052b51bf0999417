"""The roles of nodes, each as its package describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.decode_node.role import AGGREGATED, DECODE
from tandem.encode_node.role import ENCODE
from tandem.prefill_node.role import PREFILL

if TYPE_CHECKING:
    from tandem.node.config import NodeConfig
    from tandem.node.node import Node

TRAITS = {traits.role: traits for traits in (PREFILL, DECODE, AGGREGATED, ENCODE)}


def make_node(config: NodeConfig) -> Node[Any]:
    return TRAITS[config.role].make(config)
