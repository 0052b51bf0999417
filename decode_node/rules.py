"""What a decode node takes, and how its part of a request ends."""

from __future__ import annotations

from tandem.wire.errors import InvalidRequest
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit, TokenChunk, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams


class DecodeRules:
    """With a transfer it waits for the prompt's KV; without one it reads the prompt itself."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def sampling_for(self, submit: Submit) -> SamplingParams:
        if submit.transfer is not None and submit.transfer.role is not TransferRole.CONSUME:
            raise InvalidRequest("a decode node was asked to send KV; it only receives", "transfer.role")
        return submit.sampling

    def finish_of(self, submit: Submit, update: TokenChunk) -> FinishReason | None:
        return update.finish
