"""A prefill node, put together."""

from __future__ import annotations

from engine.node import Node
from engine.node_config import NodeConfig
from kvtransfer.registry import create_connector
from prefill_node.rules import PrefillRules
from wire.requests import ToNode
from wire.sockets import Channel


class PrefillNode(Node):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(
            config,
            PrefillRules(),
            open_channel=lambda host, receive, name: Channel(host, ToNode, receive, name=name),
            make_connector=create_connector,
        )
