"""OpenAI's own client, unchanged, works with the router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tandem.base.errors import WireError
from tests.router.conftest import RunningRouter, StartRouter

# Importing it takes a second, for which collecting these tests need not wait.
if TYPE_CHECKING:
    import openai


@pytest.fixture
def client(router: RunningRouter) -> openai.OpenAI:
    return router.official_client()


def test_completions(router: RunningRouter, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="the fox", max_tokens=5, seed=1)
    assert answer.choices[0].text == router.expected("the fox", 5, seed=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    stream = client.completions.create(model="fake", prompt="the fox", max_tokens=5, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in stream) == answer.choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "seed": 1,
    }
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].logprobs is not None
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 5


def test_models(client: openai.OpenAI) -> None:
    from openai import NotFoundError

    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(NotFoundError):
        client.models.retrieve("none")


def test_errors_are_the_clients_own_exceptions(start_router: StartRouter) -> None:
    from openai import APIError, BadRequestError, InternalServerError, NotFoundError

    router = start_router()
    client = router.official_client()
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="none", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as wrong:
        client.completions.create(model="fake", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    router.nodes["d0"].set(pause_at=3)
    stream = client.completions.create(model="fake", prompt="the fox", max_tokens=50, seed=1, stream=True)
    parts = [next(stream).choices[0].text]  # it has begun: an error is no end
    router.nodes["d0"].set(error_at=(3, WireError("deadline_exceeded", "it took too long")), pause_at=None)
    with pytest.raises(APIError, match="too long"):
        parts.extend(part.choices[0].text for part in stream)
    assert "".join(parts) == router.expected("the fox", 3, seed=1)
    router.remove("d0").kill()
    with pytest.raises(InternalServerError) as busy:
        client.completions.create(model="fake", prompt="x")
    assert busy.value.status_code == 503
    assert "no decode node is ready" in busy.value.message
    assert busy.value.response.headers["retry-after"]
