"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors of prompts, without generated tokens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tandem.api.openai.answer import AnswerHead, json_pieces
from tandem.api.openai.caller import Caller
from tandem.api.openai.served_model import ServedModel
from tandem.api.vectors.answer_types import EmbeddingList, Ranking, ScoreList
from tandem.api.vectors.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest
from tandem.api.vectors.vectors import (
    VectorPlan,
    plan_embeddings,
    plan_rerank,
    plan_scores,
    read_vectors,
    vector_bytes,
    whole_embeddings,
    whole_rerank,
    whole_scores,
)
from tandem.base.errors import Unavailable
from tandem.router.http.answer_notes import routing_headers
from tandem.router.http.body import PARSED_TIMES, SEQUENCE_BYTES, TOKEN_BYTES, BodyShare, read_body
from tandem.router.http.exchange import HttpExchange, send_pieces
from tandem.router.http.generate_routes import KeptSize, enter, planned, running
from tandem.router.http.operation import ApiOperation
from tandem.router.http.services import Services
from tandem.router.wings import RouteRow, RouterWing


class VectorEndpoint(msgspec.Struct, frozen=True):
    """What differs between the paths that make vectors."""

    id_prefix: str
    request_type: Any
    plan: Callable[[Any, ServedModel, Caller], Awaitable[VectorPlan]]
    whole: Callable[[AnswerHead, VectorPlan, Any, Sequence[bytes]], Awaitable[dict[str, Any]]]


EMBEDDINGS = VectorEndpoint("embd", EmbeddingRequest, plan_embeddings, whole_embeddings)
SCORE = VectorEndpoint("score", ScoreRequest, plan_scores, whole_scores)
RERANK = VectorEndpoint("rerank", RerankRequest, plan_rerank, whole_rerank)


async def make_vectors(endpoint: VectorEndpoint, services: Services, exchange: HttpExchange) -> None:
    with enter(services, exchange) as reservation:
        with services.bodies.share() as share:
            request, plan = await _read(endpoint, services, exchange, share)
            kept_of_body = share.size * PARSED_TIMES
        reservation.take_tokens(plan.prompt_tokens, [])
        inputs = kept_of_body + TOKEN_BYTES * plan.prompt_tokens + SEQUENCE_BYTES * len(plan.specs)
        size = KeptSize(inputs, vector_bytes(plan))

        async def work() -> None:
            async with running(services, exchange, plan, reservation, size, eager=False) as generation:
                head = AnswerHead.new(endpoint.id_prefix, int(time.time()), services.model.name_of(request.model))
                answer = await endpoint.whole(head, plan, request, await read_vectors(generation))
                await send_pieces(exchange.send, json_pieces(answer), routing_headers(generation))
                if exchange.trace is not None:
                    exchange.trace.answer_id = head.id
                    exchange.trace.flushed(time.monotonic())

        await exchange.until_disconnect(work)


async def _read(
    endpoint: VectorEndpoint, services: Services, exchange: HttpExchange, share: BodyShare
) -> tuple[Any, VectorPlan]:
    request = await read_body(exchange, endpoint.request_type, services.config, share)
    services.model.check_name(request.model)
    if services.model.max_model_len is None:  # nodes tell how the model makes vectors; there is none yet
        raise Unavailable(services.dispatcher.why_unavailable("prefill or aggregated"))
    return request, await planned(endpoint.plan, services, exchange, request, exchange.request_id)


class Vectors(RouterWing):
    # fmt: off
    operations = (
        ApiOperation(
            "post", "/v1/embeddings", "Make vectors of texts", EmbeddingList, EmbeddingRequest, example={"input": "Hello!"}
        ),
        ApiOperation(
            "post", "/v1/score", "Compare texts by their vectors", ScoreList, ScoreRequest,
            example={"text_1": "Hello!", "text_2": ["Good day!", "Goodbye!"]},
        ),
        ApiOperation(
            "post", "/v1/rerank", "Sort documents by their vectors' nearness to a query's", Ranking, RerankRequest,
            example={"query": "Hello!", "documents": ["Good day!", "Goodbye!"]},
        ),
    )
    # fmt: on

    def routes(self) -> list[RouteRow]:
        score, rerank = partial(make_vectors, SCORE), partial(make_vectors, RERANK)
        return [
            ("/v1/embeddings", partial(make_vectors, EMBEDDINGS), ["POST"]),
            ("/v1/score", score, ["POST"]),
            ("/v1/rerank", rerank, ["POST"]),
            ("/score", score, ["POST"]),
            ("/rerank", rerank, ["POST"]),
            ("/v2/rerank", rerank, ["POST"]),
        ]


WING = Vectors
