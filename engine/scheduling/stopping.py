"""When a token is a request's last."""

from __future__ import annotations

from tandem.engine.request import Request, RequestStatus


def status_after(request: Request, token: int) -> RequestStatus | None:
    """How `token`, the newest of the request's tokens, ends it; None when it goes on. A stop token counts only
    after `min_tokens`, and before the length: a request that ends on its last possible token with a stop has
    stopped."""
    if token in request.stop_token_ids and request.num_output_tokens >= request.sampling.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.length_limit:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
