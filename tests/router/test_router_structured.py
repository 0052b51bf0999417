"""Answers in a form that the client asks for: what nodes are told, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.router.config import Heartbeat
from tests.router.conftest import RunningRouter, StartRouter

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": True}}


class Follows:
    """Reads texts as the nodes would, by the grammar that the last request brought."""

    def __init__(self, router: RunningRouter, folder: str) -> None:
        text = (Path(folder) / "tokenizer.json").read_text()
        self._tokenizer = LLTokenizer(text, eos_token=1)
        self._router = router

    @property
    def grammars(self) -> set[str | None]:
        nodes = self._router.nodes.values()
        return {node.submits[-1].sampling.grammar for node in nodes if node.submits}

    def __call__(self, text: str) -> bool:
        (grammar,) = self.grammars
        assert grammar is not None
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture
def follows(router: RunningRouter, model_folder: str) -> Follows:
    return Follows(router, model_folder)


def test_a_schema_reaches_both_nodes_as_the_same_grammar(router: RunningRouter, follows: Follows) -> None:
    assert router.chat(response_format=format_of(PERSON), max_tokens=3).status_code == 200
    assert len(router.nodes["p0"].submits) == len(router.nodes["d0"].submits) == 1
    assert follows('{"name": "Bob", "age": 7}')
    assert follows('{\n  "name": "Bob",\n  "age": 7\n}')
    assert not follows('{"name": "Bob"}')
    assert not follows('{"name": "Bob", "age": 7, "x": 1}')
    assert not follows("Bob is 7.")


def test_white_space_is_bounded_and_no_client_sets_the_grammar_librarys_options(
    router: RunningRouter, follows: Follows
) -> None:
    router.chat(response_format={"type": "json_object"}, max_tokens=3)
    assert follows('{"a":' + " " * 40 + "1}")
    assert not follows('{"a":' + " " * 41 + "1}")
    own = {**PERSON, "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    router.chat(response_format=format_of(own), max_tokens=3)
    assert not follows('{xx"name":"Bob","age":7}')
    assert router.chat(response_format=format_of({**own, "not": {}})).status_code == 400
    for fields in ({}, {"response_format": {"type": "text"}}):
        router.chat(max_tokens=3, **fields)
        assert follows.grammars == {None}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": PERSON}, '{"name":"x","age":1}', "{}"),
        ({"regex": r"a/b\d{2}"}, "a/b42", "a/b4"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ({"grammar": 'start: "a" rest\nrest: /[0-9]+/'}, "a17", "17"),
    ],
)
def test_other_forms(router: RunningRouter, follows: Follows, wanted: dict[str, Any], good: str, bad: str) -> None:
    assert router.complete(structured_outputs=wanted, max_tokens=3).status_code == 200
    assert follows(good)
    assert not follows(bad)


def test_what_is_wrong_with_a_schema_is_said(router: RunningRouter) -> None:
    error = router.chat(response_format=format_of({"type": "array", "items": {}, "uniqueItems": True})).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in error["message"]
    pattern = router.chat(response_format=format_of({"type": "string", "pattern": "("})).json()["error"]
    assert "unclosed group" in pattern["message"]
    assert "%json" not in pattern["message"]


def test_the_official_clients_parsing_works_unchanged(start_saying: StartRouter) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int
        tags: list[str] | None

    # The client's first parse imports and builds much, in the process of the nodes that must not be taken for silent.
    patient = Heartbeat(ping_interval=0.1, silence=5)
    router = start_saying('{"name": "Bob", "age": 7, "tags": null}', heartbeat=patient)
    client = router.official_client()
    answer = client.chat.completions.parse(
        model="fake", messages=[{"role": "user", "content": "who?"}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=7, tags=None)
