"""A request in vLLM's words, and what comes of it in ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as TheirReason

from tandem.base.errors import InvalidRequest
from tandem.engine.request import Request
from tandem.wire import sampling as ours
from tandem.wire.kv_events import SALT
from tandem.wire.sampling import FinishReason, TokenLogprobs

GRAMMARS = "guidance"  # the backend that reads llguidance's dialect, in which routers write grammars
_SEEDS = 1 << 63

REASONS = {
    TheirReason.STOP: FinishReason.STOP,
    TheirReason.REPETITION: FinishReason.STOP,
    TheirReason.LENGTH: FinishReason.LENGTH,
    TheirReason.ABORT: FinishReason.ABORT,
    TheirReason.ERROR: FinishReason.ERROR,
}


@dataclasses.dataclass(slots=True)
class VllmRequest:
    ours: Request
    theirs: Any  # vLLM's
    num_outputs: int  # that its router has or was sent
    queue_s: float = 0.0
    num_cached: int = 0  # prompt tokens that were found in the prefix cache
    num_received: int = 0  # tokens whose KV a peer sent
    is_admitted: bool = False
    is_answered: bool = False  # a first chunk was sent


def to_vllm(request: Request, adapter: Any = None) -> EngineCoreRequest:
    """Raises InvalidRequest for what vLLM does not take. Tokens that the request brings from another node follow its prompt. `adapter`:
    a LoRARequest."""
    facts = request.facts
    try:
        params = _params(request)
    except (VLLMError, ValueError) as error:
        raise InvalidRequest(f"vLLM does not take this request: {error}") from error
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.all_token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=adapter,
        # Its name in the events of the cache says what it is.
        cache_salt=SALT + facts.cache_salt if facts.cache_salt is not None else None,
        data_parallel_rank=None,
        priority=facts.priority,
    )


def _params(request: Request) -> SamplingParams:
    asked, brought = request.facts.sampling, request.num_initial_output_tokens
    stops = set(asked.stop_token_ids) | (set() if asked.ignore_eos else request.eos_token_ids)
    repetition = asked.repetition_detection
    params = SamplingParams(
        max_tokens=asked.max_tokens - brought,
        min_tokens=max(0, asked.min_tokens - brought),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=asked.seed % _SEEDS if asked.temperature else None,
        stop_token_ids=sorted(stops),
        ignore_eos=True,  # `stop_token_ids` has them
        logit_bias=dict(asked.logit_bias) or None,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        skip_reading_prefix_cache=request.facts.skip_reading_prefix_cache or None,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(grammar=asked.grammar) if asked.grammar else None,
        repetition_detection=RepetitionDetectionParams(
            max_pattern_size=repetition.max_pattern_size,
            min_pattern_size=repetition.min_pattern_size,
            min_count=repetition.min_count,
        )
        if repetition is not None
        else None,
    )
    # What vLLM's front end would set.
    params._all_stop_token_ids = stops | request.eos_token_ids
    if asked.bad_words:
        params._bad_words_token_ids = [list(word) for word in asked.bad_words]
    if params.structured_outputs is not None:
        params.structured_outputs._backend = GRAMMARS
    return params


def logprobs_of(found: Any, most: int) -> list[TokenLogprobs]:
    """The rows of vLLM's LogprobsLists or LogprobsTensors: each begins with the token itself."""
    ranks = getattr(found, "sampled_token_ranks", None)
    ranks = found.selected_token_ranks if ranks is None else ranks
    rows = zip(found.logprob_token_ids.tolist(), found.logprobs.tolist(), ranks.tolist(), strict=True)
    return [
        TokenLogprobs(ids[0], values[0], int(rank), list(zip(ids[1 : most + 1], values[1 : most + 1], strict=True)))
        for ids, values, rank in rows
    ]


def prompt_logprobs_of(live: VllmRequest, found: Any) -> list[TokenLogprobs | None]:
    """One entry for each token of the prompt; the first has none."""
    asked: ours.SamplingParams = live.ours.facts.sampling
    rows: Sequence[TokenLogprobs | None] = logprobs_of(found, asked.prompt_logprobs or 0)
    return [None, *rows][: live.ours.num_prompt_tokens]
