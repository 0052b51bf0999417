"""OpenAI's own client against a real cluster: the promises of docs/api.md, used as the client's users do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.integration.conftest import RunningDeployment
from tests.integration.reference import ExpectedAnswer

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PROMPT = "The quick brown fox jumps over"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str
    inhabitants: int


@pytest.fixture(scope="module")
def client(server: RunningDeployment) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120, http_client=http
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: RunningDeployment) -> str:
    return server.model


class TestCompletions:
    def test_text_and_its_tokens_are_the_same_prompt(
        self, client: openai.OpenAI, model: str, server: RunningDeployment
    ) -> None:
        tokens = server.http.post("/tokenize", json={"model": model, "prompt": PROMPT}).json()["tokens"]
        back = server.http.post("/detokenize", json={"model": model, "tokens": tokens}).json()
        assert back["prompt"] == PROMPT
        texts = [
            client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=8).choices[0].text
            for prompt in (PROMPT, tokens)
        ]
        assert texts[0] == texts[1] != ""

    def test_echo_puts_the_prompt_in_front_with_its_log_probabilities(self, client: openai.OpenAI, model: str) -> None:
        answer = client.completions.create(
            model=model, prompt=PROMPT, echo=True, logprobs=2, temperature=0, max_tokens=4
        )
        choice = answer.choices[0]
        assert choice.text.startswith(PROMPT)
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        first, *others = choice.logprobs.token_logprobs or []
        assert first is None, "nothing stands before the first token"
        assert all(value <= 0 for value in others)


class TestChats:
    def test_a_prefix_that_was_read_before_is_counted_unless_the_salt_is_another(
        self, client: openai.OpenAI, model: str, expected: list[ExpectedAnswer]
    ) -> None:
        def cached(salt: str) -> int:
            answer = client.completions.create(
                model=model, prompt=expected[-1].prompt, max_tokens=2, extra_body={"cache_salt": salt}
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            return (details.cached_tokens or 0) if details is not None else 0

        assert cached("one tenant") == 0
        assert cached("one tenant") > 400
        assert cached("another") == 0


class TestStructure:
    def test_a_schema_given_as_a_class_comes_back_as_one(self, client: openai.OpenAI, model: str) -> None:
        answer = client.chat.completions.parse(
            model=model, messages=CAPITAL, temperature=0, max_completion_tokens=120, response_format=City
        )
        assert isinstance(answer.choices[0].message.parsed, City)

    @pytest.mark.parametrize(
        "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
    )
    def test_a_required_call_is_made_whole_and_streamed(
        self, client: openai.OpenAI, model: str, tool_choice: Any
    ) -> None:
        fields: Any = {
            "model": model,
            "messages": [{"role": "user", "content": "Weather in Rome for three days?"}],
            "tools": [WEATHER],
            "tool_choice": tool_choice,
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_completion_tokens": 80,
        }
        (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert arguments["city"] in ("Paris", "Rome")
        assert 1 <= arguments["days"] <= 7
        name, streamed = "", ""
        for part in client.chat.completions.create(**fields, stream=True):
            for choice in part.choices:
                for piece in choice.delta.tool_calls or []:
                    name += piece.function.name or ""
                    streamed += piece.function.arguments or ""
        assert (name, json.loads(streamed)) == ("get_weather", arguments)


class TestVectors:
    TEXTS = ("The quick brown fox jumps over the lazy dog.", "A fox jumps.", "Stock prices fell " * 60)

    def test_they_are_transformers_own_pooled(
        self, client: openai.OpenAI, model: str, server: RunningDeployment, taught: Path
    ) -> None:
        """The prefill node makes them beside an answer, twice: the second time its cache has the prompts."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        for _ in range(2):
            raw = client.embeddings.with_raw_response.create(model=model, input=list(self.TEXTS))
            assert raw.headers["x-tandem-nodes"].startswith("prefill=")
            assert "decode=" not in raw.headers["x-tandem-nodes"]
        made = raw.parse()
        reference = AutoModel.from_pretrained(taught, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(taught)
        for text, found in zip(self.TEXTS, made.data, strict=True):
            with torch.inference_mode():
                hidden = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)
            assert found.embedding == pytest.approx(expected.tolist(), abs=1e-3)
        server.until_quiet()
