"""A prefill node, put together."""

from __future__ import annotations

from tandem.kvtransfer.registry import create_connector
from tandem.node.config import NodeConfig
from tandem.node.node import Node
from tandem.prefill_node.rules import PrefillRules
from tandem.wire.lines import NumberedChannel


class PrefillNode(Node):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(
            config,
            PrefillRules(),
            open_channel=NumberedChannel,
            make_connector=create_connector,
        )
