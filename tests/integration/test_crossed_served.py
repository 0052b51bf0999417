"""A model with an encoder through all processes: HTTP, router, a prefill node that runs the encoder, and a decode node that gets the
cross-attention's keys and values with the prompt's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.model import tiny_crossed
from tests.integration.conftest import Deploy, RunningDeployment, float32_config
from tests.pictures import tokenizer

NEW_TOKENS = 8
TEXTS = ["a prompt goes in", "what is this?", "compare one image with another image, and then a third"]


@pytest.fixture(scope="module")
def crossed(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningDeployment, Path]]:
    words = tokenizer()
    path = tiny_crossed.save("bart-forced", tmp_path_factory.mktemp("crossed"), vocab_size=words.get_vocab_size())
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    with deploy(float32_config(path, prefill=1, decode=1)) as running:
        yield running, path


def test_the_answers_are_generates_and_the_blocks_are_handed_over(crossed: tuple[RunningDeployment, Path]) -> None:
    server, path = crossed
    words = tokenizer()
    prompts = [words.encode(text).ids for text in TEXTS]
    expected = [answer.tokens for answer in tiny_crossed.reference(path, prompts, NEW_TOKENS)]

    def ask(prompt: list[int]) -> list[int]:
        answer = server.complete(prompt, NEW_TOKENS, ignore_eos=True, return_token_ids=True)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(len(prompts)) as at_once:
        assert list(at_once.map(ask, prompts)) == expected
    server.until_quiet()
    counters = server.counters("decode")
    assert counters["transfer_bytes_received"] > 0
    # Each prompt with its opening of two tokens, of which none was computed again.
    assert counters["prompt_tokens_received"] == sum(len(prompt) + 2 for prompt in prompts)


def test_a_client_that_goes_away_leaves_no_block(crossed: tuple[RunningDeployment, Path]) -> None:
    server, _ = crossed
    body = {"model": server.model, "prompt": TEXTS[0], "max_tokens": 40, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    server.until_quiet()


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("completions", {"prompt": [7] * 70, "max_tokens": 4}, "more than the 64 that this model's encoder reads"),
        ("completions", {"prompt": "a", "max_tokens": 4, "prompt_logprobs": 1}, "an encoder, which predicts no token"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chat template"),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_do_is_refused(
    crossed: tuple[RunningDeployment, Path], path: str, fields: dict[str, object], says: str
) -> None:
    server, _ = crossed
    response = server.http.post(f"/v1/{path}", json={"model": server.model, **fields})
    assert response.status_code == 400, response.text
    assert says in response.text
    server.until_quiet()


def test_an_answer_ends_where_the_decoders_positions_do(crossed: tuple[RunningDeployment, Path]) -> None:
    server, _ = crossed
    answer = server.complete([9, 8, 7], 100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 62  # of 64 positions, two are the opening's
    assert answer["choices"][0]["finish_reason"] == "length"
    server.until_quiet()
