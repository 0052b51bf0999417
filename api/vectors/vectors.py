"""Plans of vectors for texts, and the answers made from them: embeddings, scores and rankings."""

from __future__ import annotations

import base64
import math
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tandem.api.lives import VectorLife, VectorLives
from tandem.api.openai.answer import AnswerHead, LoopTurn
from tandem.api.openai.caller import Caller
from tandem.api.openai.prompts import PromptTooLong, prompt_ids, prompts_of
from tandem.api.openai.served_model import ServedModel
from tandem.api.sequence import SequenceSpec
from tandem.api.settings import ApiSettings
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.vectors.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest, VectorFields
from tandem.base.errors import InternalError, InvalidRequest
from tandem.wire.pooling import VectorModel
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

_NO_TOKENS = SamplingParams(max_tokens=1)
_NUMBER_BYTES = 4
_WRITTEN_BYTES = 24  # of one number in JSON


class VectorPlan(msgspec.Struct, frozen=True):
    specs: list[SequenceSpec]
    size: int  # numbers in each vector

    @property
    def prompt_tokens(self) -> int:
        return sum(len(spec.facts.prompt_token_ids) for spec in self.specs)


async def plan_embeddings(request: EmbeddingRequest, model: ServedModel, caller: Caller) -> VectorPlan:
    texts = prompts_of(request.input, "input")
    special = request.add_special_tokens is not False
    named = [(text, "input") for text in texts]
    return await _plan(request, named, model, caller, request.dimensions, special=special)


async def plan_scores(request: ScoreRequest, model: ServedModel, caller: Caller) -> VectorPlan:
    first, second = _score_texts(request)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1: must be one text, or as many as text_2 has ({len(second)}), not {len(first)}", "text_1"
        )
    named = [*((text, "text_1") for text in first), *((text, "text_2") for text in second)]
    return await _plan(request, named, model, caller)


async def plan_rerank(request: RerankRequest, model: ServedModel, caller: Caller) -> VectorPlan:
    named = [(request.query, "query"), *((text, "documents") for text in _document_texts(request))]
    return await _plan(request, named, model, caller)


def _score_texts(request: ScoreRequest) -> tuple[list[str], list[str]]:
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (request.text_1, request.text_2))
    return first, second


def _document_texts(request: RerankRequest) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in request.documents]


async def _plan(
    request: VectorFields,
    named: Sequence[tuple[str | list[int], str]],  # each prompt with the name of its field
    model: ServedModel,
    caller: Caller,
    dimensions: int | None = None,
    *,
    special: bool = True,
) -> VectorPlan:
    vectors = _vectors_of(model)
    if dimensions is not None and dimensions > vectors.size:
        raise InvalidRequest(
            f"dimensions: must be at most {vectors.size}, which the model's vectors have, not {dimensions}",
            "dimensions",
        )
    _check_count(len(named), named[-1][1], model.config)
    pooling = msgspec.structs.replace(vectors.pooling, dimensions=dimensions)
    turn, owner = LoopTurn(), caller.cache_owner(request.cache_salt)
    specs: list[SequenceSpec] = []
    for text, param in named:
        specs.append(
            SequenceSpec(
                label=caller.label,
                facts=RequestFacts(
                    prompt_token_ids=await _token_ids(text, param, request, model, owner, special=special),
                    sampling=_NO_TOKENS,
                    priority=caller.priority(request.priority),
                    cache_salt=caller.cache_salt(request.cache_salt),
                    lora=model.adapter_of(request.model),
                    pooling=pooling,
                    when_idle=caller.when_idle,
                ),
                deadline=caller.deadline,
                first_by=caller.first_by,
                session=caller.session,
                trace=caller.trace,
                arrived=caller.arrived,
            )
        )
        await turn.pass_on()
    return VectorPlan(specs, dimensions or vectors.size)


def _vectors_of(model: ServedModel) -> VectorModel:
    if model.vectors is None:
        raise InvalidRequest(
            f"{model.names[0]} makes no vectors: it is served for text. Serve an embedding model, whose files say how it pools, "
            "or set model.pooling to mean, last or cls"
        )
    return model.vectors


def _check_count(texts: int, param: str, config: ApiSettings) -> None:
    most = config.limits.inputs_per_request
    if texts > most:
        raise InvalidRequest(f"{param}: at most {most} texts in one request, not {texts}", param)


async def _token_ids(
    text: str | list[int], param: str, request: VectorFields, model: ServedModel, owner: CacheOwner, *, special: bool
) -> list[int]:
    context, keep = model.max_model_len, request.truncate_prompt_tokens
    most = context if keep is None else None
    ids = await prompt_ids(text, param, model.tokenizer, most, special=special, owner=owner)
    if keep is not None and (keep > 0 or context is not None):
        if keep == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be at least 1, or -1 for what the model's context holds",
                "truncate_prompt_tokens",
            )
        ids = ids[-(keep if keep > 0 else context or 0) :]
    if context is not None and len(ids) > context:
        raise PromptTooLong(
            f"{param}: has a text of {len(ids)} tokens, and the model's context is {context}; shorten it, or set "
            "truncate_prompt_tokens to -1",
            param,
        )
    return ids


async def read_vectors(generation: VectorLives) -> list[bytes]:
    """Waits for all vectors and returns them in the plan's order. Raises the first failure."""
    left = len(generation.lives)
    while left:
        for life in await generation.news():
            if life.error is not None:
                raise life.error
            left -= 1
    return [_made(life) for life in generation.lives]


def _made(life: VectorLife) -> bytes:
    if life.vector is None:
        raise InternalError("a request for a vector has ended without one")
    return life.vector


def vector_bytes(plan: VectorPlan) -> int:
    """The memory of the plan's vectors, as they arrive and as JSON."""
    return len(plan.specs) * plan.size * (_NUMBER_BYTES + _WRITTEN_BYTES)


# --- answers


async def whole_embeddings(
    head: AnswerHead, plan: VectorPlan, request: EmbeddingRequest, vectors: Sequence[bytes]
) -> dict[str, Any]:
    show: Callable[[bytes], list[float] | str] = _as_base64 if request.encoding_format == "base64" else _numbers

    def items() -> Iterator[dict[str, Any]]:
        for index, vector in enumerate(vectors):
            yield {"object": "embedding", "index": index, "embedding": show(vector)}

    return {"object": "list", "data": items(), "model": head.model, "usage": _usage(plan)}


async def whole_scores(
    head: AnswerHead, plan: VectorPlan, request: ScoreRequest, vectors: Sequence[bytes]
) -> dict[str, Any]:
    count = len(_score_texts(request)[0])
    scores = await similarities(vectors[:count], vectors[count:])
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {**head.fields("list"), "data": data, "usage": _usage(plan)}


async def whole_rerank(
    head: AnswerHead, plan: VectorPlan, request: RerankRequest, vectors: Sequence[bytes]
) -> dict[str, Any]:
    """Ranks the best document first. Equal ones keep the request's order."""
    scores = await similarities(vectors[:1], vectors[1:])
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if request.return_documents is not False:
        texts = _document_texts(request)
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {"id": head.id, "model": head.model, "results": iter(results), "usage": _usage(plan)}


async def similarities(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Returns the cosine of each vector of `second` with its counterpart in `first`, or with the only one
    there. Lets the event loop go on in between."""
    turn = LoopTurn()
    known = [_numbers(vector) for vector in first]
    found: list[float] = []
    for index, vector in enumerate(second):
        found.append(_cosine(known[index if len(known) > 1 else 0], _numbers(vector)))
        await turn.pass_on()
    return found


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // _NUMBER_BYTES}f", vector))


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.sqrt(_product(first, first) * _product(second, second))
    return _product(first, second) / lengths if lengths else 0.0


def _product(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, first, second))


def _usage(plan: VectorPlan) -> dict[str, int]:
    return {"prompt_tokens": plan.prompt_tokens, "total_tokens": plan.prompt_tokens}
