"""A decode node, and its rules. An aggregated node is a decode node whose requests never have a transfer."""

from __future__ import annotations

from tandem.base.errors import InvalidRequest
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig
from tandem.node.engine_node import EngineNode
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit, TokenChunk, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams


class DecodeNode(EngineNode):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(
            config, DecodeRules(config.role), open_channel=NumberedChannel, make_connector=create_connector
        )


class DecodeRules:
    """A request with a transfer waits for the prompt's KV; for a request without one this node computes the prompt itself."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def sampling_for(self, submit: Submit) -> SamplingParams:
        if submit.transfer is not None and submit.transfer.role is not TransferRole.CONSUME:
            raise InvalidRequest("a decode node was asked to send KV; it only receives", "transfer.role")
        return submit.sampling

    def finish_of(self, submit: Submit, update: TokenChunk) -> FinishReason | None:
        return update.finish
