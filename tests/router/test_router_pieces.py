"""Answers of any size are written in bounded pieces, and equal the answer written at once."""

from __future__ import annotations

from tests.router.conftest import StartRouter

LONGEST_PIECE = 256 << 10


def test_a_large_answer_comes_in_chunks_and_whole(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    answer = router.complete(max_tokens=400, n=4, logprobs=20, seed=3)
    assert answer.status_code == 200
    assert len(answer.content) > LONGEST_PIECE
    assert "content-length" not in answer.headers
    for index, choice in enumerate(answer.json()["choices"]):
        assert choice["text"] == router.expected("the fox", 400, seed=3 + index)
        assert len(choice["logprobs"]["tokens"]) == 400
    small = router.complete(max_tokens=4)
    assert int(small.headers["content-length"]) == len(small.content)


def test_a_reader_that_fell_far_behind_gets_every_token(start_router: StartRouter) -> None:
    router = start_router(prefill=0).with_small_buffers()
    with router.stream(max_tokens=400, logprobs=20, n=4, seed=3) as events:
        router.wait_for(router.idle, "all of it is there, and nothing is read")
        choices = [body["choices"][0] for body in events.rest() if body != "[DONE]"]
    for index in range(4):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == router.expected("the fox", 400, seed=3 + index)
        assert sum(len(choice["logprobs"]["tokens"]) for choice in mine) == 400
