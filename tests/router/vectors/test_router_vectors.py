"""/v1/embeddings, /v1/score and /v1/rerank: what is asked of nodes, which of them, what is answered, and what is refused."""

from __future__ import annotations

import base64
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from tandem.api.vectors.answer_types import EmbeddingList, Ranking, ScoreList
from tandem.base.errors import Unavailable
from tandem.router.config import Limits
from tandem.wire.nodes import Role
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import VECTOR_SIZE, FakeNode, fake_vector

VECTORS = VectorModel(Pooling(PoolingKind.MEAN), VECTOR_SIZE)
CONTEXT = 2048


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    return keep_router(vectors=VECTORS)


def ask(router: RunningRouter, path: str = "embeddings", **body: Any) -> httpx.Response:
    return router.client.post(f"/v1/{path}", json=body)


def embed(router: RunningRouter, given: Any, **body: Any) -> dict[str, Any]:
    response = ask(router, input=given, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(router: RunningRouter, text: str | list[int], dimensions: int | None = None) -> list[float]:
    ids = router.server.services.model.tokenizer.encode(text, special=True) if isinstance(text, str) else text
    return unpack(fake_vector(ids, Pooling(PoolingKind.MEAN, dimensions=dimensions)))


def unpack(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


# --- embeddings


def test_a_text(router: RunningRouter) -> None:
    answer = embed(router, "the fox", model="fake")
    msgspec.convert(answer, EmbeddingList)
    assert answer["model"] == "fake"
    (item,) = answer["data"]
    assert item == {"object": "embedding", "index": 0, "embedding": expected(router, "the fox")}
    tokens = len(router.server.services.model.tokenizer.encode("the fox", special=True))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_several_come_back_in_order(router: RunningRouter) -> None:
    cases: list[tuple[Any, list[Any]]] = [
        (["a", "the fox", "a"], ["a", "the fox", "a"]),
        ([70, 71, 72], [[70, 71, 72]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
    ]
    for given, texts in cases:
        answer = embed(router, given)
        assert [item["index"] for item in answer["data"]] == list(range(len(texts)))
        assert [item["embedding"] for item in answer["data"]] == [expected(router, text) for text in texts]
    (item,) = embed(router, "the fox", encoding_format="base64")["data"]
    assert unpack(base64.b64decode(item["embedding"])) == expected(router, "the fox")


def test_the_node_is_asked_for_the_models_vector_and_no_token(router: RunningRouter) -> None:
    (item,) = embed(router, "the fox", dimensions=3, user="u")["data"]
    assert item["embedding"] == expected(router, "the fox", 3)
    (submit,) = router.nodes["p0"].submits
    assert submit.pooling == Pooling(PoolingKind.MEAN, dimensions=3)
    assert submit.transfer is None
    assert router.nodes["d0"].submits == []


def test_openais_client_as_it_is(router: RunningRouter) -> None:
    with router.official_client() as client:
        made = client.embeddings.create(model="fake", input=["the fox", "a"])
        assert made.data[0].embedding == expected(router, "the fox")
        assert made.data[1].index == 1
        floats = client.embeddings.create(model="fake", input="the fox", encoding_format="float", dimensions=2)
        assert floats.data[0].embedding == pytest.approx(expected(router, "the fox", 2))
        assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0


# --- score and rerank


def cosine(router: RunningRouter, first: str, second: str) -> float:
    return math.fsum(a * b for a, b in zip(expected(router, first), expected(router, second), strict=True))


def test_one_text_against_many_and_pairs(router: RunningRouter) -> None:
    answer = ask(router, "score", text_1="the fox", text_2=["the dog", "the fox"]).json()
    msgspec.convert(answer, ScoreList)
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([cosine(router, "the fox", "the dog"), 1.0])
    assert answer["usage"]["prompt_tokens"] > 0
    answer = ask(router, "score", text_1=["a", "the fox"], text_2=["the dog", "a"]).json()
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([cosine(router, "a", "the dog"), cosine(router, "the fox", "a")])


def test_rerank_sorts_by_nearness(router: RunningRouter) -> None:
    documents = ["zzz", "the fox", {"text": "the fox jumps"}]
    answer = ask(router, "rerank", model="fake", query="the fox", documents=documents).json()
    msgspec.convert(answer, Ranking)
    results = answer["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1.0)
    assert results[0]["document"] == {"text": "the fox"}
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    best = ask(router, "rerank", query="the fox", documents=documents, top_n=1, return_documents=False).json()
    assert [result["index"] for result in best["results"]] == [1]
    assert "document" not in best["results"][0]


# --- which nodes


def test_an_aggregated_node_makes_them_too(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=0, aggregated=1, vectors=VECTORS)
    assert embed(router, "the fox")["data"][0]["embedding"] == expected(router, "the fox")


def test_a_decode_node_is_not_asked(start_router: StartRouter) -> None:
    for decode in (0, 1):
        router = start_router(prefill=0, decode=decode, vectors=VECTORS)
        error = error_of(ask(router, input="the fox"), 503)
        assert error["message"].startswith("no prefill or aggregated node is ready")
        assert not any(node.submits for node in router.nodes.values())


def test_a_lost_node_is_replaced_by_another(start_router: StartRouter) -> None:
    router = start_router(prefill=2, vectors=VECTORS)
    for node in router.nodes.values():
        node.set(wedged=True)
    with router.new_client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/embeddings", json={"input": "the fox"})
        asked, other = first_asked(router)
        asked.kill()
        other.set(wedged=False)
        assert answer.result().json()["data"][0]["embedding"] == expected(router, "the fox")
    router.wait_for(router.idle, "nothing is left behind")


def first_asked(router: RunningRouter) -> tuple[FakeNode, FakeNode]:
    prefill = [node for node in router.nodes.values() if node.role is Role.PREFILL]
    router.wait_for(lambda: any(node.submits for node in prefill), "one of them is asked")
    return (prefill[0], prefill[1]) if prefill[0].submits else (prefill[1], prefill[0])


def test_a_node_that_refuses_is_answered_for_by_another(start_router: StartRouter) -> None:
    router = start_router(prefill=2, vectors=VECTORS)
    router.nodes["p0"].set(refuse=Unavailable("full").to_wire())
    for _ in range(3):
        assert embed(router, "the fox")["data"][0]["embedding"] == expected(router, "the fox")


def test_an_end_without_a_vector_is_an_error_and_no_answer(start_router: StartRouter) -> None:
    router = start_router(vectors=VECTORS)
    router.nodes["p0"].set(forget_vectors=True)
    assert "without one" in error_of(ask(router, input="the fox"), 500)["message"]


def test_a_client_that_goes_away_cancels(router: RunningRouter) -> None:
    node = router.nodes["p0"]
    node.set(wedged=True)
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/embeddings", json={"input": ["a", "the fox"]}, timeout=0.2)
    node.wait_until(lambda: len(node.cancels) == 2, "both are cancelled")
    router.wait_for(router.idle, "nothing is left behind")


def test_the_line_for_vectors_is_their_own(start_router: StartRouter) -> None:
    """Texts wait when the prefill nodes are full, and answers go on."""
    router = start_router(vectors=VECTORS, limits=Limits(inflight_per_node=2))
    node = router.nodes["p0"]
    texts = [f"number {index}" for index in range(9)]
    answer = embed(router, texts)
    assert [item["embedding"] for item in answer["data"]] == [expected(router, text) for text in texts]
    assert len(node.submits) == 9
    assert router.complete(max_tokens=3).status_code == 200


# --- bad input

TOO_LONG = [70] * (CONTEXT + 1)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("embeddings", {}, "input", "is required"),
    ("embeddings", {"input": []}, "input", "at least 1"),
    ("embeddings", {"input": ""}, "input", "must not be empty"),
    ("embeddings", {"input": ["a", ""]}, "input", "must not be empty"),
    ("embeddings", {"input": [[]]}, "input", ""),
    ("embeddings", {"input": ["a", 3]}, "input", "not a mixture"),
    ("embeddings", {"input": [70, 99_999]}, "input", "token id 99999 is outside the vocabulary"),
    ("embeddings", {"input": [-1]}, "input", ""),
    ("embeddings", {"input": TOO_LONG}, "input", f"{CONTEXT + 1} tokens, and the model's context is {CONTEXT}"),
    ("embeddings", {"input": "a" * 200_000}, "input", "more than the model's context"),
    ("embeddings", {"input": "a", "dimensions": VECTOR_SIZE + 1}, "dimensions", f"must be at most {VECTOR_SIZE}"),
    ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", ""),
    ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
    ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ("embeddings", {"input": ["a"] * 5}, "input", "at most 4 texts in one request, not 5"),
    ("score", {"text_1": "a"}, "text_2", ""),
    ("score", {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}, "text_1", ""),
    ("score", {"text_1": "a", "text_2": []}, "text_2", ""),
    ("rerank", {"query": "a", "documents": []}, "documents", ""),
    ("rerank", {"query": "", "documents": ["a"]}, "query", ""),
    ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", ""),
]


def test_bad_requests_are_refused_by_name(start_router: StartRouter) -> None:
    router = start_router(vectors=VECTORS, limits=Limits(inputs_per_request=4))
    for path, body, param, says in BAD:
        error = error_of(ask(router, path, **body), 400)
        assert (error["param"] or "").split("[")[0] == param
        assert says in error["message"]


def test_the_whole_context_may_be_used_and_longer_texts_be_cut(router: RunningRouter) -> None:
    embed(router, TOO_LONG[1:])
    cut = embed(router, [71, *TOO_LONG], truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == CONTEXT
    assert len(router.nodes["p0"].submits[-1].prompt_token_ids) == CONTEXT
    assert embed(router, [70, 71, 72], truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2


def test_a_model_for_text_says_what_would_be_right(start_router: StartRouter) -> None:
    router = start_router()
    for path, body in (
        ("embeddings", {"input": "a"}),
        ("score", {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ):
        message = error_of(ask(router, path, **body), 400)["message"]
        assert "makes no vectors" in message
        assert "model.pooling" in message
    assert all(node.submits == [] for node in router.nodes.values())


def test_texts_are_ranked_under_every_name(router: RunningRouter) -> None:
    asked = {"query": "the fox", "documents": ["the dog", "the fox"], "top_n": 1}
    for path in ("/rerank", "/v2/rerank"):
        assert router.ask(path, **asked).json()["results"] == ask(router, "rerank", **asked).json()["results"]
    pair = {"text_1": "the fox", "text_2": "the dog"}
    assert router.ask("/score", **pair).json()["data"] == ask(router, "score", **pair).json()["data"]
