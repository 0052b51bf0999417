"""A prompt for a model with an encoder: the decoder's first tokens follow it, and the answer ends with the decoder's positions."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import ContextLengthExceeded, InvalidRequest
from tandem.engine.model.runner import EncoderRules
from tandem.node.requests import with_opening
from tandem.wire.requests import Submit
from tandem.wire.sampling import SamplingParams

RULES = EncoderRules(opening=(2, 5), longest_prompt=4, longest_answer=3)


def submit(prompt: list[int], **sampling: Any) -> Submit:
    return Submit(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling), reply_to="", timeout_s=1.0
    )


def test_the_opening_follows_and_the_answer_is_no_longer_than_its_positions() -> None:
    made = with_opening(submit([7, 8], max_tokens=9), RULES)
    assert made.prompt_token_ids == [7, 8, 2, 5]
    assert made.sampling.max_tokens == 3
    assert with_opening(submit([7, 8, 9, 7], max_tokens=2), RULES).sampling.max_tokens == 2


def test_what_the_encoder_cannot_read_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match="5 tokens are more than the 4"):
        with_opening(submit([7] * 5), RULES)
    with pytest.raises(InvalidRequest, match="empty"):
        with_opening(submit([]), RULES)
    with pytest.raises(InvalidRequest, match="predicts no token"):
        with_opening(submit([7], prompt_logprobs=1), RULES)
