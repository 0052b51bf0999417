"""A decode node, put together. An aggregated node is one that is never told of a transfer."""

from __future__ import annotations

from decode_node.rules import DecodeRules
from engine.node import Node
from engine.node_config import NodeConfig
from kvtransfer.registry import create_connector
from wire.requests import ToNode
from wire.sockets import Channel


class DecodeNode(Node):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(
            config,
            DecodeRules(config.role),
            open_channel=lambda host, receive, name: Channel(host, ToNode, receive, name=name),
            make_connector=create_connector,
        )
