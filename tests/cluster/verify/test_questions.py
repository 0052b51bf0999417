"""What two servers are asked: prompts of many lengths that fit, and the requests of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.verify.questions import built_in, of_file


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
