"""Answers of any size are written in bounded pieces, and equal the answer written at once."""

from __future__ import annotations

from tests.router.conftest import StartRouter

LONGEST_PIECE = 256 << 10


def test_a_large_answer_comes_in_chunks_and_whole(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    answer = router.complete(max_tokens=400, n=8, logprobs=20, seed=3)
    assert answer.status_code == 200
    assert len(answer.content) > LONGEST_PIECE
    assert "content-length" not in answer.headers
    choices = answer.json()["choices"]
    assert [choice["text"] for choice in choices] == [
        router.expected("the fox", 400, seed=3 + index) for index in range(8)
    ]
    assert {len(choice["logprobs"]["tokens"]) for choice in choices} == {400}


def test_a_small_answer_says_its_length(start_router: StartRouter) -> None:
    answer = start_router(prefill=0).complete(max_tokens=4)
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_reader_that_fell_far_behind_gets_every_token(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    with router.stream(max_tokens=1500, logprobs=20, n=4, seed=3) as events:
        router.wait_for(router.idle, "all of it is there, and nothing is read")
        texts: dict[int, str] = {}
        tokens: dict[int, int] = {}
        for body in events.rest():
            if body != "[DONE]":
                (choice,) = body["choices"]
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                tokens[choice["index"]] = tokens.get(choice["index"], 0) + len(choice["logprobs"]["tokens"])
    assert texts == {index: router.expected("the fox", 1500, seed=3 + index) for index in range(4)}
    assert set(tokens.values()) == {1500}
