"""Other projects' clients, unchanged. Those that are not installed are skipped: `pip install tandem-serve[clients]`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.router.text.tokenizer import Tokenizer
from tests.router.conftest import Running, StartRouter
from tests.router.fake_node import scripted
from tests.router.test_router_tools import HERMES, PARIS, WEATHER

ASK: Any = [{"role": "user", "content": "weather in Paris?"}]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever proxy the environment names: the router is on this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched


def answering(start: StartRouter, tokenizer: Tokenizer, end_token: int, text: str) -> Running:
    return start(rule=scripted([*tokenizer.encode(text, special=False), end_token]))


def test_litellm(start_router: StartRouter, tokenizer: Tokenizer, end_token: int) -> None:
    litellm = pytest.importorskip("litellm")
    router = answering(start_router, tokenizer, end_token, HERMES)
    options: Any = {
        "model": "hosted_vllm/fake",
        "api_base": f"{router.url}/v1",
        "api_key": "unused",
        "messages": ASK,
        "tools": [WEATHER],
    }
    whole = litellm.completion(**options)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == PARIS
    parts = list(litellm.completion(**options, stream=True))
    built = litellm.stream_chunk_builder(parts, messages=ASK)
    (streamed,) = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == PARIS[1]
    assert litellm.completion(**options, top_k=5, chat_template_kwargs={"a": 1}).choices


def test_litellm_through_the_messages_api(
    start_router: StartRouter, tokenizer: Tokenizer, end_token: int
) -> None:
    litellm = pytest.importorskip("litellm")
    router = answering(start_router, tokenizer, end_token, "It will rain.")
    answer = litellm.completion(
        model="anthropic/fake", api_base=router.url, api_key="unused", messages=ASK, max_tokens=50
    )
    assert answer.choices[0].message.content == "It will rain."


def test_langchain(start_router: StartRouter, tokenizer: Tokenizer, end_token: int) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    router = answering(start_router, tokenizer, end_token, HERMES)
    chat = langchain_openai.ChatOpenAI(
        model="fake", base_url=f"{router.url}/v1", api_key="unused", max_retries=0
    )
    bound = chat.bind_tools([WEATHER])
    (call,) = bound.invoke("weather in Paris?").tool_calls
    assert (call["name"], call["args"]) == PARIS
    chunks = list(bound.stream("weather in Paris?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == PARIS[1]
    assert whole.usage_metadata is None or whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("responses", [False, True])
def test_langchains_structured_output(
    start_router: StartRouter, tokenizer: Tokenizer, end_token: int, responses: bool
) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    router = answering(start_router, tokenizer, end_token, '{"name": "Bob", "age": 7}')
    schema = {
        "title": "person",
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    chat = langchain_openai.ChatOpenAI(
        model="fake",
        base_url=f"{router.url}/v1",
        api_key="unused",
        max_retries=0,
        use_responses_api=responses,
    )
    found = chat.with_structured_output(schema, method="json_schema", strict=True).invoke("who?")
    assert found == {"name": "Bob", "age": 7}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(start_router: StartRouter, tokenizer: Tokenizer, end_token: int, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int

    written = '{"name": "Bob", "age": 7}'
    if mode == "TOOLS":
        written = f'<tool_call>\n{{"name": "Person", "arguments": {written}}}\n</tool_call>'
    router = answering(start_router, tokenizer, end_token, written)
    client = instructor.from_openai(router.official_client(), mode=getattr(instructor.Mode, mode))
    found = client.chat.completions.create(model="fake", messages=ASK, response_model=Person, max_retries=0)
    assert found.model_dump() == {"name": "Bob", "age": 7}
    assert router.nodes["p0"].submits[-1].sampling.grammar is not None
