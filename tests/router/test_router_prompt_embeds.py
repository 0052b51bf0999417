"""Prompts as tensors: what nodes get, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.config import Limits
from tests.api.prompt_embeds.test_prompt_embeds import by_safetensors, by_torch, rows, tensor_of
from tests.router.conftest import RunningRouter, StartRouter, error_of


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    return keep_router(prompt_embeds=True, limits=Limits(prompt_embeds_bytes=200_000))


def ask(router: RunningRouter, given_embeds: Any, **fields: Any) -> Any:
    body = {"model": "fake", "prompt_embeds": given_embeds, "max_tokens": 3, **fields}
    return router.client.post("/v1/completions", json=body)


@pytest.mark.parametrize("prompt", [..., None, ""])
def test_both_nodes_get_the_rows_and_what_they_are_called(router: RunningRouter, prompt: Any) -> None:
    tensor = rows(40)
    fields = {} if prompt is ... else {"prompt": prompt}
    answer = ask(router, by_torch(tensor), return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 40
    assert answer.json()["choices"][0]["prompt_token_ids"] == []
    submits = [submit for node in router.nodes.values() for submit in node.submits]
    assert len(submits) == 2
    for submit in submits:
        assert submit.embeds is not None
        assert tensor_of(submit.embeds).equal(tensor)
        assert submit.prompt_token_ids == [0] * 40
        assert submit.media == submit.embeds.features()
        assert [each.length for each in submit.media] == [16, 16, 8]


def test_several_prompts_and_choices_keep_their_rows(router: RunningRouter) -> None:
    tensors = [rows(20, seed) for seed in range(3)]
    answer = ask(router, [by_torch(tensors[0]), by_safetensors(x=tensors[1]), by_torch(tensors[2])], n=2)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 6
    submits = router.nodes["d0"].submits
    names = [submit.media[0].identifier for submit in submits]
    assert sorted(map(names.count, names)) == [2] * 6
    for submit in submits:
        assert submit.embeds is not None
        assert submit.media == submit.embeds.features()


def test_what_does_not_go_together_is_refused_by_name(router: RunningRouter) -> None:
    good = by_torch(rows(20))
    for embeds, fields, param in (
        (good, {"prompt": "and this"}, "prompt_embeds"),
        (good, {"prompt": [5]}, "prompt_embeds"),
        (good, {"echo": True}, "echo"),
        (good, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (good, {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ([by_torch(rows(2)), "x"], {}, "prompt_embeds[1]"),
        ([], {}, "prompt_embeds"),
        (5, {}, "prompt_embeds"),
        ([by_torch(rows(1))] * 129, {}, "prompt"),
        (good, {"max_tokens": 2040}, "max_tokens"),
    ):
        assert error_of(ask(router, embeds, **fields), 400)["param"] == param
    assert not router.nodes["d0"].submits


def test_more_rows_than_the_context_are_too_long(router: RunningRouter) -> None:
    assert error_of(ask(router, by_torch(rows(2048))), 400)["code"] == "context_length_exceeded"


def test_they_are_off_unless_a_setting_says_otherwise(start_router: StartRouter) -> None:
    plain = start_router()
    assert "router.prompt_embeds" in error_of(ask(plain, by_torch(rows(2))), 400)["message"]
