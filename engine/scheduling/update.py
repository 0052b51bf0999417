"""What a step changed for one request, for whoever waits for its tokens."""

from __future__ import annotations

import msgspec

from tandem.engine.request import Request
from tandem.wire.errors import TandemError, WireError
from tandem.wire.sampling import FinishReason, TokenLogprobs


class RequestUpdate(msgspec.Struct, gc=False):
    """New output tokens, an end, or both.

    A decode node reports the token that came with a handoff as the prefill node does: both name its index.
    """

    request_id: str
    start: int  # index of the first of `token_ids` in the request's output
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, with finish=stop
    error: WireError | None = None  # with finish=error
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; on the request's first update


def failure_of(request: Request, error: TandemError) -> RequestUpdate:
    return RequestUpdate(
        request.request_id, request.num_output_tokens, [], FinishReason.ERROR, error=error.to_wire()
    )
