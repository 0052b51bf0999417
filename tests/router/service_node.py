"""The service of a node with the real scheduler, behind its real socket; only the model is fake."""

from __future__ import annotations

from tandem.decode_node.node import DecodeRules
from tandem.engine.config import SchedulerConfig
from tandem.engine.core import Engine
from tandem.node.config import NodeConfig
from tandem.node.loop import Item, Mailbox
from tandem.node.service import NodeService
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, Role
from tests.engine.engine_fakes import BLOCK_SIZE, FakeRunner, make_scheduler


class ServiceNode:
    def __init__(
        self, node_id: str, runner: FakeRunner, config: SchedulerConfig | None = None, *, debug: bool = False
    ) -> None:
        self.channel = NumberedChannel("127.0.0.1", 77, name=node_id)
        mailbox: Mailbox[Item] = Mailbox()
        engine = Engine(make_scheduler(runner, config=config), runner, None, debug=debug)
        rules = DecodeRules(Role.AGGREGATED)
        self.service = NodeService(NodeConfig(node_id, Role.AGGREGATED), 77, rules, engine, mailbox, self.channel)
        self.service.start()
        self.channel.listen(self.service.receive, begun=self.service.line_begun, replaced=self.service.router_replaced)
        self.info = NodeInfo(node_id, Role.AGGREGATED, 77, self.channel.endpoint, "", "fake", 2048, BLOCK_SIZE)

    def kill(self) -> None:
        self.service.stop()
        self.channel.close()
