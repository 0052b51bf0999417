"""What one node is told when it starts. Built by the cluster, sent to the node's process as msgspec bytes."""

from __future__ import annotations

import msgspec

from tandem.engine.config import EngineConfig
from tandem.kvtransfer.base import TransferConfig
from tandem.wire.nodes import Role


class NodeTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a node waits for others."""

    status_period_s: float = 0.25  # a node's report of itself to every router that pinged it lately
    router_silence_s: float = 10.0  # then a router's requests are aborted
    drain_s: float = 60.0
    grammar_s: float = 10.0  # to compile one answer's grammar


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node_id: str
    role: Role
    host: str = "127.0.0.1"  # the address that routers and peers reach this node at
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig | None = None  # None: this node neither sends nor receives KV
    timeouts: NodeTimeouts = NodeTimeouts()
    cores: list[int] = []  # bind what computes to these, unless a quota counts; empty: wherever it may run
