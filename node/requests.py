"""Checks a Submit against the loaded model, converts it for the engine, and keeps the live requests: owner, tokens reported, deadline.

The router has checked the request against its own copy of the model's folder, which may differ from this node's. A wrong request that
passes here fails a step for all its requests, or gets a wrong answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.base.errors import AdapterMissing, ContextLengthExceeded, InvalidRequest, WireError
from tandem.engine.model.runner import EncoderRules, ModelInfo
from tandem.engine.request import Request
from tandem.wire.adapters import name_of
from tandem.wire.embeds import PLACEHOLDER, PromptEmbeds
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit, TokenChunk, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams

if TYPE_CHECKING:
    from tandem.engine.model.adapter_book import AdapterBook

# Numbers of this size and above are rounded to infinity in a type: half a step beyond its largest number.
_INFINITE_FROM = {"bfloat16": 2.0**128 - 2.0**119, "float16": 65520.0}
_SPARE_DEADLINES = 100


class RoleRules(Protocol):
    """The rules by which nodes of different roles differ."""

    @property
    def role(self) -> Role: ...

    def sampling_for(self, submit: Submit) -> SamplingParams:
        """The sampling parameters for this node's part of the request. Raises InvalidRequest for a request that this role cannot take."""

    def finish_of(self, submit: Submit, update: TokenChunk) -> FinishReason | None:
        """The finish reason that the router gets for an update."""


def request_of(submit: Submit, sampling: SamplingParams, now: float, eos_token_ids: frozenset[int]) -> Request:
    """Makes the engine's Request. `sampling`: the parameters for this node's part of the request."""
    if sampling.grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=_salted(sampling.grammar, submit.cache_salt))
    return Request(
        submit.request_id,
        submit if sampling is submit.sampling else msgspec.structs.replace(submit, sampling=sampling),
        output_token_ids=submit.output_token_ids,
        arrival_time=now,
        transfer=submit.transfer,
        cache_peers=submit.cache_peers,
        eos_token_ids=eos_token_ids,
    )


def _salted(grammar: str, salt: str | None) -> str:
    """Returns a grammar of the same meaning whose text is this salt's alone, so that a compiled one is found only by requests with
    the salt, and the time to the first token does not tell what another tenant's answers follow. A comment at the end does it:
    errors still name the right lines."""
    return grammar if salt is None else f"{grammar}\n// {hashlib.sha256(salt.encode()).hexdigest()}"


def with_opening(submit: Submit, rules: EncoderRules) -> Submit:
    """Returns a request to a model with an encoder, which reads the client's prompt, with the decoder's opening behind it, so that the router
    need not know of it. Both nodes of a request do this, so they agree on its tokens. An answer ends where the decoder's positions do."""
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


def check_submit(
    submit: Submit,
    info: ModelInfo,
    *,
    adapters: AdapterBook[Any] | None,
    writes_hidden_states: bool,
    follows_grammars: bool,
) -> None:
    """Raises InvalidRequest or AdapterMissing if this node cannot run the request. `adapters`: None if this node serves none."""
    _check_vocabulary(submit, info)
    _check_adapter(submit, adapters)
    if submit.sampling.hidden_states is not None and not writes_hidden_states:
        raise InvalidRequest(
            "hidden_states: this server writes none; the operator sets model.hidden_states_folder", "hidden_states"
        )
    if submit.sampling.grammar is not None and not follows_grammars:
        raise InvalidRequest("this node follows no grammars")
    _check_pooling(submit, info)
    if submit.embeds is not None:
        _check_embeds(submit, submit.embeds, info)
    elif submit.media or submit.images:
        _check_images(submit, info)


def _check_vocabulary(submit: Submit, info: ModelInfo) -> None:
    """A token outside the vocabulary would read foreign memory, or fail the whole step."""
    vocabulary = info.vocab_size
    for tokens, name in ((submit.prompt_token_ids, "prompt"), (submit.output_token_ids, "output")):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise InvalidRequest(
                f"token {wrong} of the {name} is not among the model's {vocabulary}", f"{name}_token_ids"
            )


def _check_adapter(submit: Submit, adapters: AdapterBook[Any] | None) -> None:
    """A loaded adapter that is no longer served still counts, because the request may continue here after it began on another node."""
    if submit.lora is not None and (adapters is None or not adapters.has(submit.lora)):
        raise AdapterMissing(
            f"this node does not have the adapter {name_of(submit.lora)!r} with the weights that the request is for"
        )


def _check_pooling(submit: Submit, info: ModelInfo) -> None:
    vectors, pooling = info.vectors, submit.pooling
    if pooling is None:
        if vectors is not None and not vectors.generates:
            raise InvalidRequest("this node's model makes vectors only: ask for /v1/embeddings")
        return
    if vectors is None:
        raise InvalidRequest("this node's model makes no vectors (model.pooling)")
    if pooling.dimensions is not None and not 0 < pooling.dimensions <= vectors.size:
        raise InvalidRequest(f"dimensions: must be from 1 to {vectors.size}, not {pooling.dimensions}", "dimensions")
    if submit.transfer is not None or submit.output_token_ids or submit.keep is not None:
        raise InvalidRequest("a vector is made of a prompt alone, on one node")


def _check_images(submit: Submit, info: ModelInfo) -> None:
    """The router placed the images by its own copy of the model's folder, which may differ from this node's."""
    rules, prompt = info.images, submit.prompt_token_ids
    if rules is None:
        raise InvalidRequest("this node's model reads no images")
    if submit.encoders and len(submit.encoders) != len(submit.images):
        raise InvalidRequest(f"{len(submit.encoders)} encoder nodes are named for {len(submit.images)} images")
    end = 0
    for feature in submit.media:
        begin, end, before = feature.offset, feature.offset + feature.length, end
        if not (
            before <= begin < end <= len(prompt)
            and 0 <= feature.image < len(submit.images)
            and prompt[begin:end] == [rules.token_id] * feature.length
        ):
            raise InvalidRequest("the prompt's placeholders are not where its images are said to be")


def _check_embeds(submit: Submit, embeds: PromptEmbeds, info: ModelInfo) -> None:
    """Rows of a wrong size, or with NaN, would fail the step, or poison the cached blocks that later prompts find by these rows' hash."""
    size = info.embed_size
    if not size:
        raise InvalidRequest(
            "prompt_embeds: this model takes tokens alone: it reads them again beside their embeddings, or runs on several ranks",
            "prompt_embeds",
        )
    if submit.images or submit.pooling is not None or submit.sampling.prompt_logprobs is not None:
        raise InvalidRequest("prompt_embeds: is the whole prompt, and only tokens follow it", "prompt_embeds")
    if not embeds.is_whole or embeds.width != size:
        raise InvalidRequest(
            f"prompt_embeds: rows of this model have {size} numbers, not {embeds.width}", "prompt_embeds"
        )
    if submit.prompt_token_ids != [PLACEHOLDER] * embeds.count or submit.media != embeds.features():
        raise InvalidRequest("prompt_embeds: the prompt is not what its rows are called", "prompt_embeds")
    if not (np.abs(numbers := _numbers_of(embeds)) < np.inf).all():
        raise InvalidRequest("prompt_embeds: some of its numbers are infinite, or none (NaN)", "prompt_embeds")
    if not (np.abs(numbers) < _INFINITE_FROM.get(info.dtype, np.inf)).all():
        raise InvalidRequest(
            f"prompt_embeds: some of its numbers are infinite in {info.dtype}, in which this model computes",
            "prompt_embeds",
        )


def _numbers_of(embeds: PromptEmbeds) -> npt.NDArray[np.float32]:
    if embeds.dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(embeds.data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(embeds.data, "<f4" if embeds.dtype == "float32" else "<f2").astype("<f4")


def keeps_here(submit: Submit) -> bool:
    """Whether this node keeps the request's background answer. A prefill node does not if a decode node continues the request."""
    is_sent_away = submit.transfer is not None and submit.transfer.role is TransferRole.PRODUCE
    return submit.keep is not None and not is_sent_away


def writes_states_here(submit: Submit) -> bool:
    """Whether this node is to write the prompt's hidden states. A decode node does not while a prefill node reads the prompt."""
    is_read_elsewhere = submit.transfer is not None and submit.transfer.role is TransferRole.CONSUME
    return submit.sampling.hidden_states is not None and not is_read_elsewhere


def failed_chunk(submit: Submit, error: WireError) -> TokenChunk:
    """The chunk that tells the router that the request has ended with an error."""
    return TokenChunk.failed(submit.request_id, len(submit.output_token_ids), error)


@dataclasses.dataclass(slots=True)
class LiveRequest:
    submit: Submit
    deadline: float
    reported: int  # output tokens that its router knows: it sent them with the Submit, or this node sent them


class LiveRequests:
    """Used by the step thread alone. Invariant: each live request's deadline is in the heap."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def of_router(self, reply_to: str) -> list[LiveRequest]:
        return [live for live in self._live.values() if live.submit.reply_to == reply_to]

    def is_owner(self, request_id: str, reply_to: str) -> bool:
        live = self._live.get(request_id)
        return live is not None and live.submit.reply_to == reply_to

    def begin(self, submit: Submit, now: float) -> None:
        deadline = now + submit.timeout_s
        self._live[submit.request_id] = LiveRequest(submit, deadline, len(submit.output_token_ids))
        heapq.heappush(self._deadlines, (deadline, submit.request_id))
        # An ended request leaves its deadline in the heap, perhaps half an hour away: rebuild the heap when most are stale.
        if len(self._deadlines) > 2 * len(self._live) + _SPARE_DEADLINES:
            self._deadlines = [(live.deadline, id) for id, live in self._live.items()]
            heapq.heapify(self._deadlines)

    def end(self, request_id: str) -> LiveRequest | None:
        return self._live.pop(request_id, None)

    def clear(self) -> None:
        self._live.clear()

    def overdue(self, now: float) -> Iterator[LiveRequest]:
        """Yields each request whose deadline has passed, once. It stays live until `end`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            live = self._live.get(request_id)
            if live is not None and live.deadline == deadline:
                yield live

    def seconds_until_due(self, now: float) -> float | None:
        while self._deadlines:
            deadline, request_id = self._deadlines[0]
            live = self._live.get(request_id)
            if live is not None and live.deadline == deadline:
                return deadline - now
            heapq.heappop(self._deadlines)
        return None
