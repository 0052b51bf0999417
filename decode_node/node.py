"""A decode node, put together. An aggregated node is one that is never told of a transfer."""

from __future__ import annotations

from tandem.decode_node.rules import DecodeRules
from tandem.kvtransfer.registry import create_connector
from tandem.node.config import NodeConfig
from tandem.node.node import Node
from tandem.wire.lines import NumberedChannel


class DecodeNode(Node):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(
            config,
            DecodeRules(config.role),
            open_channel=NumberedChannel,
            make_connector=create_connector,
        )
