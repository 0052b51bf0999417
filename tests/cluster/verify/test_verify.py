"""`tandem verify`: what two servers are asked, where two answers first differ, and what it says when it cannot compare."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.cli import main
from tandem.cluster.verify import command
from tandem.cluster.verify.command import remake
from tandem.cluster.verify.comparison import choices_of, first_difference
from tandem.cluster.verify.judge import judge
from tandem.cluster.verify.questions import built_in, of_file
from tandem.router.receipts.receipt import Receipt, marks_of, signed
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter, end_token, start_router
from tests.router.fake_node import Board

BITS = -1.2345678901234567


def answer(values: tuple[float, ...] = (-0.5, BITS), **changes: Any) -> dict[str, Any]:
    choice = {
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": [None, {"2": {"logprob": -3.0, "rank": 1, "decoded_token": "b"}}],
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": list(values), "top_logprobs": [{"a": -0.5}, {"b": values[1]}]},
        "finish_reason": "length",
    }
    return {"choices": [{**choice, **changes}]}


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    found = first_difference("q", choices_of(one), choices_of(other))
    return None if found is None else f"{found.place}: {found.what}"


def test_the_same_is_the_same_and_an_alternative_alone_is_a_difference() -> None:
    other = answer()
    assert difference(answer(), other) is None
    other["choices"][0]["logprobs"]["top_logprobs"][0] = {"a": -0.25}
    assert difference(answer(), other) == "token 0 of the answer: other tokens' log-probabilities"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (answer((-0.5, math.nextafter(BITS, 0))), "token 1 of the answer: log-probabilities"),
        (answer(token_ids=[5, 7]), "token 1 of the answer: tokens"),
        (answer(token_ids=[5]), "token 1 of the answer: tokens"),
        (answer(prompt_token_ids=[1]), "token 1 of the prompt: tokens"),
        (answer(prompt_logprobs=[None, {}]), "token 1 of the prompt: log-probabilities"),
        (answer(finish_reason="stop"), "its end: reasons"),
        ({"choices": []}, "the answer: numbers of choices"),
    ],
)
def test_one_difference_is_named_with_its_place(changed: dict[str, Any], said: str) -> None:
    assert difference(answer(), changed) == said


def test_a_chat_is_read_as_well_and_a_server_that_tells_no_tokens_cannot_be_compared() -> None:
    def chat(logprob: float) -> dict[str, Any]:
        content = [{"token": "a", "logprob": logprob, "top_logprobs": [{"token": "b", "logprob": -2.0}]}]
        choice = {"message": {}, "token_ids": [5], "logprobs": {"content": content}, "finish_reason": "stop"}
        return {"choices": [choice], "prompt_token_ids": [1]}

    assert difference(chat(-1.0), chat(-1.0)) is None
    assert difference(chat(-1.0), chat(-1.5)) == "token 0 of the answer: log-probabilities"
    with pytest.raises(ConfigurationError, match="both URLs must be Tandem servers"):
        choices_of({"choices": [{"text": "a"}]})


__all__ = ["end_token", "start_router"]

LOOKS = 40  # at most; a look that finds no request takes 2 s
SHORT = 5  # tokens, of which only the judge's own prompt has so few


def with_a_new_node(router: RunningRouter) -> None:
    before = router.board.rule

    def rule(prompt: Sequence[int], seed: int, index: int) -> int:
        return 80 if len(prompt) > SHORT and index == 2 else before(prompt, seed, index)

    router.add("new", Role.AGGREGATED).board = Board(rule, router.board.eos)
    router.wait_ready()


def test_a_clients_request_convicts_a_new_node(start_router: StartRouter, tmp_path: Path) -> None:
    router = start_router(prefill=0, decode=0)
    router.add("old", Role.AGGREGATED)
    router.wait_ready()
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 4}')
    judging, ended = judge(router.url, file), threading.Event()
    assert judging.learn() == 1
    with_a_new_node(router)

    def ask() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            router.complete(prompt=f"client {number} asks something", max_tokens=4)

    clients = threading.Thread(target=ask)
    clients.start()
    try:
        found = next(filter(None, (judging.ask_next() for _ in range(LOOKS))), "")
    finally:
        ended.set()
        clients.join()
        judging.close()
    assert found.startswith("a client's request ")
    assert "token 2 of the answer: tokens " in found
    assert found.endswith("answered by old and new")
    assert not judging.compared.startswith("0 ")


def test_the_built_in_prompts_fit_and_sampled_ones_have_seeds() -> None:
    asked = built_in(context=256, max_tokens=40)
    lengths = [question.body["truncate_prompt_tokens"] for question in asked]
    assert max(lengths) == 200
    assert len(set(lengths)) == len(lengths) / 2
    assert all("seed" in question.body and question.body["return_token_ids"] for question in asked)
    assert len({json.dumps(question.body) for question in asked}) == len(asked)
    assert max(question.body["truncate_prompt_tokens"] for question in built_in(None, 40)) == 1000


def test_a_context_without_room_and_a_file_with_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--max-tokens is 40, and the servers' context has 40 tokens"):
        built_in(context=40, max_tokens=40)
    file = tmp_path / "asked.jsonl"
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        of_file(file)
    for text, said in (
        ("", "has no request"),
        ("{", "asked.jsonl:1 is no JSON"),
        ("[]", "asked.jsonl:1 must be an object with either a prompt or messages"),
        ('{"prompt": "a"}\n{"prompt": "a", "messages": []}', "asked.jsonl:2 must be an object"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            of_file(file)


def test_the_requests_of_a_file_are_asked_for_what_can_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"prompt": "a", "logprobs": 2, "seed": 9}\n\n{"messages": [], "stream": true, "stream_options": {}}\n'
        '{"prompt": "a", "seed": null}'
    )
    first, second, third = of_file(file)
    assert (first.path, first.name) == ("/v1/completions", "line 1 of asked.jsonl")
    assert (first.body["logprobs"], first.body["seed"]) == (2, 9)
    assert second.path == "/v1/chat/completions"
    assert second.body == {
        "logprobs": True, "top_logprobs": 5, "seed": 3, "messages": [], "stream": False, "return_token_ids": True
    }  # fmt: skip
    assert third.body["seed"] == 4, "a seed of null is none"


RECEIPT = Receipt("0.2", "/v1/completions", "c", "", "p", {"seed": 7}, marks_of([1, 2], None, "stop"))
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", NOWHERE], "--url must be given twice, for the two servers to compare, not 1 times"),
        (["--url", NOWHERE, "--url", NOWHERE, "-o", "json"], "http://127.0.0.1:9 does not answer"),
        (["--url", NOWHERE, "--url", NOWHERE, "--at-once", "0"], "--at-once must be from 1 to 256, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--timeout", "0"], "--timeout must be from 0 to 1e+06 seconds"),
        (["--url", NOWHERE, "--request", "b"], "--request needs a receipt and one server"),
        (["r", "--url", NOWHERE, "--request", "b"], "r cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_says_why(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("body", "seed"), [({"prompt": "a"}, 7), ({"prompt": "a", "seed": None}, 7), ({"seed": 3}, 3)])
def test_an_answer_is_made_again_with_the_seed_that_the_router_drew(
    body: dict[str, object], seed: int, tmp_path: Path
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, headers={"x-tandem-receipt": signed(RECEIPT, b"k" * 32)}, json={})

    receipt, request = tmp_path / "receipt", tmp_path / "request.json"
    receipt.write_text(signed(RECEIPT, b"k" * 32))
    request.write_text(json.dumps(body))
    server = ApiClient("http://router", None, httpx.MockTransport(answer))
    assert remake(server, receipt, request, 1.0).same
    assert json.loads(asked[0].content)["seed"] == seed


@pytest.mark.parametrize("text", ["hello", "[]", "{}"])
def test_a_server_that_answers_with_something_else_was_not_compared(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def client(url: str, key: str | None) -> ApiClient:
        return ApiClient(url, key, httpx.MockTransport(lambda request: httpx.Response(200, text=text)))

    monkeypatch.setattr(command, "ApiClient", client)
    assert main(["verify", "--url", NOWHERE, "--url", NOWHERE]) == 2
    assert "does not list its models as a Tandem server does" in capsys.readouterr().err


def test_ctrl_c_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, answered = threading.Event(), []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"max_model_len": 100}]})
        if request.url.host == "interrupted":
            raise KeyboardInterrupt
        ended.wait(20.0)
        answered.append(request)
        return httpx.Response(200, json={})

    def client(url: str, key: str | None) -> ApiClient:
        return ApiClient(url, key, httpx.MockTransport(answer))

    monkeypatch.setattr(command, "ApiClient", client)
    assert main(["verify", "--url", "http://slow", "--url", "http://interrupted"]) == 130
    assert not answered
    ended.set()
