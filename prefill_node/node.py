"""A prefill node, and its rules: it computes a prompt and one token, and hands the request over to a decode node."""

from __future__ import annotations

import msgspec

from tandem.base.errors import InvalidRequest
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig
from tandem.node.engine_node import EngineNode
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit, TokenChunk, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams


class PrefillNode(EngineNode):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, PrefillRules(), open_channel=NumberedChannel, make_connector=create_connector)


class PrefillRules:
    """A request with a transfer samples exactly one token here. If that token ends the client's request (by its stop conditions or its
    own `max_tokens`), the router gets that finish reason; otherwise it gets HANDOFF, and the decode node continues."""

    role = Role.PREFILL

    def sampling_for(self, submit: Submit) -> SamplingParams:
        if submit.transfer is None:
            return submit.sampling
        if submit.transfer.role is not TransferRole.PRODUCE:
            raise InvalidRequest("a prefill node was asked to receive KV; it only sends", "transfer.role")
        return msgspec.structs.replace(submit.sampling, max_tokens=len(submit.output_token_ids) + 1)

    def finish_of(self, submit: Submit, update: TokenChunk) -> FinishReason | None:
        capped_here = submit.transfer is not None and update.finish is FinishReason.LENGTH
        if capped_here and len(submit.output_token_ids) + 1 < submit.sampling.max_tokens:
            return FinishReason.HANDOFF
        return update.finish
