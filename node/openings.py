"""Requests to a model with an encoder. The client's prompt is what the encoder reads; the decoder's opening follows it here, so the
router need not know of it."""

from __future__ import annotations

import msgspec

from tandem.base.errors import ContextLengthExceeded, InvalidRequest
from tandem.engine.model.runner import EncoderRules
from tandem.wire.requests import Submit


def with_opening(submit: Submit, rules: EncoderRules) -> Submit:
    """Both nodes of a request do this, so they agree on its tokens. An answer ends where the decoder's positions do."""
    if submit.sampling.prompt_logprobs is not None or submit.pooling is not None:
        raise InvalidRequest(
            "this model's prompt is read by an encoder, which predicts no token of it: leave prompt_logprobs, and echo with logprobs, "
            "out",
            "prompt_logprobs",
        )
    prompt = submit.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt")
    if len(prompt) > rules.longest_prompt:
        raise ContextLengthExceeded(
            f"{len(prompt)} tokens are more than the {rules.longest_prompt} that this model's encoder reads"
        )
    sampling = submit.sampling
    if sampling.max_tokens > rules.longest_answer:
        sampling = msgspec.structs.replace(sampling, max_tokens=rules.longest_answer)
    return msgspec.structs.replace(submit, prompt_token_ids=[*prompt, *rules.opening], sampling=sampling)
