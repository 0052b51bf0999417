"""Programs that use other projects' clients as their users do: `python programs.py NAME URL MODEL`, in the clients' own environment.

The model is small and knows little, so a program checks what the server enforces: schemas, tool calls, numbers of tokens, ends.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather in a city", "parameters": PARAMETERS},
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PERSON: dict[str, Any] = {
    "title": "person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Each of the ten characters may be an escape of six, and there may be spaces.
LONGEST_PERSON = 500
# The model's answers differ between processors, so these programs must not depend on where an answer ends.
ENDLESS: dict[str, Any] = {"ignore_eos": True}


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused")


def openai_chat(url: str, model: str) -> None:
    client = openai_client(url)
    assert model in [one.id for one in client.models.list()]
    whole = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=40)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(
        client.chat.completions.create(
            model=model, messages=CAPITAL, temperature=0, max_tokens=40, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    called = client.chat.completions.create(model=model, messages=ASK, tools=[TOOL], tool_choice="required")
    (call, *_) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history = [
        *ASK,
        called.choices[0].message,
        *({"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in called.choices[0].message.tool_calls),
    ]
    assert client.chat.completions.create(model=model, messages=history, tools=[TOOL], max_tokens=5).choices
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    person = client.chat.completions.create(model=model, messages=ASK, response_format=form)
    assert set(json.loads(person.choices[0].message.content)) == {"name", "age"}
    text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=5, logprobs=2)
    assert text.choices[0].logprobs.top_logprobs
    import openai

    refused = False
    try:
        client.chat.completions.create(model="unknown", messages=ASK)
    except openai.NotFoundError:
        refused = True
    assert refused, "an unknown model was answered"


def openai_embeddings(url: str, model: str) -> None:
    client = openai_client(url)
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Stock prices fell on Monday."]
    made = client.embeddings.create(model=model, input=texts)  # it asks for base64, and decodes it
    assert [one.index for one in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float", dimensions=64)
    assert len(floats.data[0].embedding) == 64
    assert abs(sum(number**2 for number in floats.data[0].embedding) - 1) < 1e-4

    def nearness(first: int, second: int) -> float:
        return sum(a * b for a, b in zip(made.data[first].embedding, made.data[second].embedding, strict=True))

    assert nearness(0, 1) > nearness(0, 2)
    import openai

    refused = ""
    try:
        client.embeddings.create(model=model, input=texts, dimensions=100_000)
    except openai.BadRequestError as error:
        refused = error.message
    assert "dimensions" in refused


def openai_extras(url: str, model: str) -> None:
    """The further fields that vLLM's users send in the official client's `extra_body`."""
    client = openai_client(url)

    def chat(**extra: Any) -> Any:
        return client.chat.completions.create(model=model, messages=ASK, max_tokens=LONGEST_PERSON, extra_body=extra)

    def text(**extra: Any) -> Any:
        prompt = "The quick brown fox jumps over"
        return client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra)

    assert chat(guided_choice=["rain", "sun"]).choices[0].message.content in ("rain", "sun")
    assert re.fullmatch("[0-9]{3}", chat(guided_regex="[0-9]{3}").choices[0].message.content)
    assert set(json.loads(chat(guided_json=PERSON).choices[0].message.content)) == {"name", "age"}
    assert chat(guided_grammar='start: "a" "b"').choices[0].message.content == "ab"
    assert chat(structured_outputs={"choice": ["x"]}).choices[0].message.content == "x"
    told = text(return_token_ids=True)
    prompt_ids, ids = told.choices[0].prompt_token_ids, told.choices[0].token_ids
    assert len(ids) == told.usage.completion_tokens
    assert len(prompt_ids) == told.usage.prompt_tokens
    short = text(truncate_prompt_tokens=3, return_token_ids=True)
    assert short.choices[0].prompt_token_ids == prompt_ids[-3:]
    assert set(text(allowed_token_ids=ids[:2], return_token_ids=True).choices[0].token_ids) <= set(ids[:2])
    shown = text(prompt_logprobs=1).choices[0].prompt_logprobs
    assert len(shown) == len(prompt_ids)
    assert shown[0] is None
    assert str(prompt_ids[1]) in shown[1]
    assert text(min_tokens=8, ignore_eos=True, top_k=1, min_p=0.1, repetition_penalty=1.1).usage.completion_tokens == 8
    raw = client.completions.with_raw_response.create(model=model, prompt="a", max_tokens=1, extra_body={"nvext": {}})
    assert raw.headers["x-tandem-ignored-fields"] == "nvext"


def openai_responses(url: str, model: str) -> None:
    client = openai_client(url)
    first = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
    assert "Paris" in first.output_text
    again = client.responses.create(
        model=model, input="Say it again.", previous_response_id=first.id, max_output_tokens=5, extra_body=ENDLESS
    )
    assert again.status == "incomplete"
    with client.responses.stream(model=model, input="What is the capital of France?", temperature=0) as stream:
        numbers = [event.sequence_number for event in stream]
        assert stream.get_final_response().output_text == first.output_text
    assert numbers == list(range(len(numbers)))
    tool = {"type": "function", "name": "weather", "description": "", "parameters": PARAMETERS, "strict": True}
    called = client.responses.create(model=model, input=ASK, tools=[tool], tool_choice="required")
    call = next(item for item in called.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    begun = client.responses.create(
        model=model, input="Tell me a story.", background=True, max_output_tokens=60, extra_body=ENDLESS
    )
    events = list(client.responses.retrieve(begun.id, stream=True))
    later = list(client.responses.retrieve(begun.id, stream=True, starting_after=events[9].sequence_number))
    assert [event.sequence_number for event in later] == [event.sequence_number for event in events[10:]]
    assert client.responses.retrieve(begun.id).output_text
    endless = client.responses.create(model=model, input="Tell me a story.", background=True)
    assert client.responses.cancel(endless.id).status in ("cancelled", "completed")
    client.responses.delete(begun.id)


def anthropic(url: str, model: str) -> None:
    from anthropic import Anthropic

    greedy = {"temperature": 0}  # this client's newest versions have no argument for it
    client = Anthropic(base_url=url, api_key="unused")
    said = client.messages.create(model=model, max_tokens=40, messages=CAPITAL, extra_body=greedy)
    assert "Paris" in said.content[0].text
    count = client.messages.count_tokens(model=model, messages=CAPITAL).input_tokens
    assert count == said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)
    with client.messages.stream(model=model, max_tokens=40, messages=CAPITAL, extra_body=greedy) as stream:
        assert "".join(stream.text_stream) == said.content[0].text
    tool: Any = {"name": "weather", "description": "the weather in a city", "input_schema": PARAMETERS}
    called = client.messages.create(
        model=model, max_tokens=200, messages=ASK, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
    )
    assert called.stop_reason == "tool_use"
    use = next(block for block in called.content if block.type == "tool_use")
    assert use.input["city"] in ("Paris", "Rome")
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    history = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=model, max_tokens=5, messages=history, tools=[tool])
    assert answer.stop_reason in ("max_tokens", "end_turn", "tool_use")


def litellm(url: str, model: str) -> None:
    import litellm

    for name, base in (
        (f"hosted_vllm/{model}", f"{url}/v1"),
        (f"openai/{model}", f"{url}/v1"),
        (f"anthropic/{model}", url),
    ):
        given: Any = {"model": name, "api_base": base, "api_key": "unused", "max_tokens": 60, "temperature": 0}
        whole = litellm.completion(**given, messages=CAPITAL)
        assert "Paris" in whole.choices[0].message.content, name
        parts = list(litellm.completion(**given, messages=CAPITAL, stream=True))
        assert "Paris" in litellm.stream_chunk_builder(parts).choices[0].message.content, name
        called = litellm.completion(**given, messages=ASK, tools=[TOOL], tool_choice="required")
        (call, *_) = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), name


def langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        chat = ChatOpenAI(
            model=model, base_url=f"{url}/v1", api_key="unused", temperature=0, use_responses_api=responses
        )
        assert "Paris" in chat.invoke(CAPITAL[0]["content"]).text
        assert "Paris" in "".join(chunk.text for chunk in chat.stream(CAPITAL[0]["content"]))
        bound = chat.bind_tools([TOOL], tool_choice="weather")
        assert bound.invoke(ASK[0]["content"]).tool_calls[0]["args"]["city"] in ("Paris", "Rome")
        found = chat.with_structured_output(PERSON, method="json_schema", strict=True).invoke("Who is Bob?")
        assert set(found) == {"name", "age"}


def instructor(url: str, model: str) -> None:
    import instructor
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int = Field(ge=0, le=99)

    for mode in ("TOOLS", "JSON_SCHEMA"):
        client = instructor.from_openai(openai_client(url), mode=getattr(instructor.Mode, mode))
        person = client.chat.completions.create(
            model=model,
            response_model=Person,
            messages=[{"role": "user", "content": "Bob is 7."}],
            max_tokens=LONGEST_PERSON,
        )
        assert isinstance(person, Person), mode


PROGRAMS: list[Callable[[str, str], None]] = [
    openai_chat,
    openai_embeddings,
    openai_extras,
    openai_responses,
    anthropic,
    litellm,
    langchain,
    instructor,
]

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    next(program for program in PROGRAMS if program.__name__ == name)(url, model)
