"""Mistakes of clients: (endpoint, body, the field that the answer must name). Each must get a 4xx that says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

HELLO = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "x", "max_tokens": 2},
    CHAT: {"model": "fake", "messages": HELLO, "max_tokens": 2},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [5]},
}


class Bad(NamedTuple):
    path: str
    fields: dict[str, Any]
    param: str
    status: int = 400
    code: str | None = None

    @property
    def name(self) -> str:
        return f"{self.path.rsplit('/', 1)[-1]}-{self.fields!r}"[:90]

    @property
    def body(self) -> dict[str, Any]:
        """The request's body. A value of `...` removes the field."""
        merged = VALID[self.path] | self.fields
        return {name: value for name, value in merged.items() if value is not ...}


# Fields that both endpoints take, each with values that it must not have.
SHARED: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, [], {}, 1e300],
    "top_p": [0, -1, 1.01, "x", [0.5]],
    "n": [0, -1, 129, 1.5, "2", True, 10**30, []],
    "stream": ["true", 1, 0, [], "yes"],
    "stream_options": [{"include_usage": True}, 5, [], "x"],
    "stop": ["", [""], [1], 5, {"a": 1}, ["x"] * 17, True, [["x"]], "x" * 1025],
    "presence_penalty": [-2.1, 2.1, "0", [], True],
    "frequency_penalty": [-2.5, 3, "0", {}, False],
    "logit_bias": [
        {"a": 1},
        {"-1": 1},
        {"999999": 1},
        {"5": 101},
        {"5": "x"},
        {"5": -101},
        [],
        "x",
        {"5": None},
        {"": 1},
        {"١": 1},
    ],
    "seed": ["x", 1.5, True, 2**63, -(2**63) - 1, []],
    "top_k": [-2, 1.5, "5", True, 2**31],
    "min_p": [-0.1, 1.1, "x"],
    "repetition_penalty": [0, 1e-300, -1, 11, "x"],
    "min_tokens": [-1, 3, "x", 1.5],
    "stop_token_ids": [[-1], ["x"], 5, [10**6], [1.5], [0] * 129],
    "include_stop_str_in_output": ["x", 1],
    "bad_words": [[""], [1], "x", ["x"] * 129],
    "ignore_eos": ["x", 1],
    "repetition_detection": [
        {},
        5,
        {"max_pattern_size": 0},
        {"max_pattern_size": 513},
        {"max_pattern_size": 4, "min_pattern_size": 5},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4, "count": 3},
    ],
    "skip_special_tokens": ["x", 0],
    "priority": ["x", 1.5, 2**40],
    "cache_salt": ["", 5, "x" * 257],
    "model": [5, [], {}, True],
    "kv_transfer_params": [{}, {"remote_host": "10.0.0.1"}, None],
    "transfer": [None],
    "reply_to": ["tcp://10.0.0.1:1"],
    "output_token_ids": [[1]],
    "lora": ["x"],
    "guided_json": [5, "no schema", {"type": "nothing"}],
    "guided_regex": ["", "(", 5],
    "guided_choice": [[], "x", [1], [""]],
    "guided_grammar": ["", "start", 5],
    "allowed_token_ids": [[], [-1], ["x"], 5, [10**6]],
    "truncate_prompt_tokens": [0, -2, "x", 1.5],
    "prompt_logprobs": [-1, 21, "x", 1.5],
    "return_token_ids": ["x", 1],
    "response_format": [{}, {"type": "x"}, "text", 5, {"type": "text", "extra": 1}],
    "regex": ["", "(", 5],
    "json_schema": [5, "no schema", {"type": "nothing"}],
    "ebnf": ["", "nonsense", 5],
    "lora_path": ["sql", 5, ["sql"]],
    "return_tokens_as_token_ids": ["x", 1],
    "add_special_tokens": ["x"],
    "hidden_states": ["", "../x", "a/b", ".x", "a" * 129, "a\n", 5],
    "use_beam_search": [True],
    "chat_template": ["{{ messages }}"],
    "functions": [[]],
    "function_call": ["auto"],
    "audio": [{}],
    "web_search_options": [{}],
    "unheard_of": [1, None, {}],
    "": [1],
    "Temperature": [1],
    "max-tokens": [1],
}

ONLY_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [..., None, 5, True, {}, "", [], [""], [[]], [[], [5]], ["x", 5], [5, "x"], [["x"]], [-1], [[-1]],
               [10**6], [[5], [10**6]], [1.5], [None], [True], [[[5]]], ["x"] * 129, [2**40]],
    "max_tokens": [0, -1, "5", 1.5, True, 2**31, []],
    "logprobs": [-1, 21, True, "x", 1.5],
    "echo": ["x", 1],
    "best_of": [0, 129, "x", 1.5],
    "suffix": ["end", 5],
    "messages": [HELLO],
    "max_completion_tokens": [0, -1, "5", 1.5, True],
}  # fmt: skip

ONLY_CHAT: dict[str, list[Any]] = {
    "messages": [..., None, [], {}, "hi", 5, [5], ["hi"], [None], [[]]],
    "max_tokens": [0, -1, "5", 1.5, 2**31],
    "max_completion_tokens": [0, -1, "5", 1.5, True],
    "logprobs": [1, "x", []],
    "top_logprobs": [-1, 21, "x", 5],
    "modalities": [["audio"], "text", [5]],
    "tools": [{}, "x", [5], [{}], [{"type": "x"}], [{"type": "function"}]],
    "tool_choice": ["x", 5, {"type": "function"}],
    "prompt_cache_key": [5],
    "chat_template_kwargs": [5, [], "x"],
    "add_generation_prompt": ["x"],
    "continue_final_message": ["x"],
    "prompt": ["x"],
    "echo": [True],
    "best_of": [2],
    "suffix": ["x"],
}

BAD_MESSAGES: list[tuple[Any, str]] = [
    ({"content": "hi"}, "messages[0].role"),
    ({"role": "wizard", "content": "hi"}, "messages[0].role"),
    ({"role": 5, "content": "hi"}, "messages[0].role"),
    ({"role": "User", "content": "hi"}, "messages[0].role"),
    ({"role": "user"}, "messages[0]"),
    ({"role": "user", "content": None}, "messages[0]"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": {"text": "hi"}}, "messages[0].content"),
    ({"role": "user", "content": [5]}, "messages[0].content[0]"),
    ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"text": "hi"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
    ({"role": "assistant", "content": None}, "messages[0]"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "messages[0].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f", "arguments": "{}"}}]}, "messages[0].tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
    ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "messages[0]"),
    ({"role": "tool", "content": "42"}, "messages[0]"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
]  # fmt: skip

# No grammar can be made of these: they are no schema, nothing satisfies them, or they ask for something that is not supported.
BAD_SCHEMAS: list[Any] = [
    {"type": "banana"},
    {"type": 5},
    {"$ref": "#/nope"},
    {"$ref": "https://example.com/schema.json"},
    {"type": "string", "pattern": "("},
    {"type": "string", "format": "unheard-of"},
    {"type": "string", "minLength": -1},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "integer", "minimum": "x"},
    {"type": "array", "items": {"type": "array", "uniqueItems": True}},
    {"type": "array", "items": 5},
    {"type": "object", "properties": 5},
    {"type": "object", "properties": {"a": 5}},
    {"type": "object", "required": [5]},
    {"type": "object", "additionalProperties": False, "required": ["x"]},
    {"enum": []},
    {"enum": 5},
    {"not": {"type": "string"}},
    {"if": {}, "then": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
]
BAD_STRUCTURES: list[Any] = [
    5,
    {},
    {"unheard_of": 1},
    {"json": {"type": "banana"}},
    {"json": 5},
    {"regex": "("},
    {"regex": "(?=a)b"},
    {"regex": ""},
    {"regex": 5},
    {"choice": []},
    {"choice": [""]},
    {"choice": "yes"},
    {"grammar": "start: unknown"},
    {"grammar": "x: y"},
    {"grammar": 'start: "a'},
    {"grammar": 'start: "a"', "regex": "a"},
    {"grammar": "s" * 300_000},
]

# Between fields.
TOGETHER: list[Bad] = [
    Bad(COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    Bad(COMPLETIONS, {"best_of": 3, "stream": True}, "best_of"),
    Bad(COMPLETIONS, {"prompt": ["x"] * 65, "n": 2}, "n"),
    Bad(COMPLETIONS, {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    Bad(COMPLETIONS, {"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    Bad(COMPLETIONS, {"stream": True, "stream_options": {"unheard_of": True}}, "stream_options.unheard_of"),
    Bad(COMPLETIONS, {"max_tokens": 5000}, "max_tokens", code="context_length_exceeded"),
    Bad(COMPLETIONS, {"prompt": "z9" * 3000}, "prompt", code="context_length_exceeded"),
    Bad(COMPLETIONS, {"prompt": [5] * 2048}, "prompt", code="context_length_exceeded"),
    Bad(COMPLETIONS, {"prompt": [5] * 2040, "max_tokens": 9}, "max_tokens", code="context_length_exceeded"),
    Bad(COMPLETIONS, {"prompt": [[5], [5] * 2048]}, "prompt", code="context_length_exceeded"),
    Bad(COMPLETIONS, {"model": "gpt-4"}, "model", status=404, code="model_not_found"),
    Bad(COMPLETIONS, {"model": ""}, "model", status=404, code="model_not_found"),
    Bad(CHAT, {"model": "Fake"}, "model", status=404, code="model_not_found"),
    Bad(CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    Bad(CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    Bad(CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    Bad(CHAT, {"messages": [*HELLO, {"role": "assistant", "content": ""}], "continue_final_message": True}, "messages"),
    Bad(
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    Bad(CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    Bad(CHAT, {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    Bad(CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
    Bad(CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    Bad(CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    *(
        Bad(
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "response_format.json_schema.schema",
        )
        for schema in BAD_SCHEMAS
    ),
    *(Bad(COMPLETIONS, {"structured_outputs": wanted}, "structured_outputs") for wanted in BAD_STRUCTURES),
    Bad(CHAT, {"max_tokens": 5000}, "max_tokens", code="context_length_exceeded"),
    Bad(CHAT, {"messages": [{"role": "user", "content": "z9" * 3000}]}, "messages", code="context_length_exceeded"),
    Bad(CHAT, {"tool_choice": "auto"}, "tool_choice"),
    Bad(CHAT, {"tool_choice": "required"}, "tool_choice"),
    Bad(CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    Bad(CHAT, {"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
    Bad(CHAT, {"tools": [{"type": "function", "function": {"name": "lookup\n"}}]}, "tools[0].function.name"),
    Bad(CHAT, {"reasoning_effort": "low\n"}, "reasoning_effort"),
    Bad(
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x\n", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    Bad(
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools[0].function.parameters",
    ),
    Bad(TOKENIZE, {"prompt": ...}, "prompt"),
    Bad(TOKENIZE, {"messages": HELLO}, "prompt"),
    Bad(TOKENIZE, {"prompt": 5}, "prompt"),
    Bad(TOKENIZE, {"prompt": None}, "prompt"),
    Bad(TOKENIZE, {"prompt": ["x"]}, "prompt"),
    Bad(TOKENIZE, {"prompt": ..., "messages": []}, "messages"),
    Bad(TOKENIZE, {"unheard_of": 1}, "unheard_of"),
    Bad(TOKENIZE, {"model": "gpt-4"}, "model", status=404),
    Bad(TOKENIZE, {"add_special_tokens": "x"}, "add_special_tokens"),
    Bad(DETOKENIZE, {"tokens": ...}, "tokens"),
    Bad(DETOKENIZE, {"tokens": "x"}, "tokens"),
    Bad(DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
    Bad(DETOKENIZE, {"tokens": [10**6]}, "tokens"),
    Bad(DETOKENIZE, {"tokens": [1.5]}, "tokens[0]"),
    Bad(DETOKENIZE, {"model": 5}, "model"),
]


def all_bad() -> Iterator[Bad]:
    """What both endpoints take is read by the same code: the chat gets one wrong value of each field."""
    yield from TOGETHER
    few = {field: values[:1] for field, values in SHARED.items()}
    for path, fields in ((COMPLETIONS, SHARED | ONLY_COMPLETIONS), (CHAT, few | ONLY_CHAT)):
        for field, values in fields.items():
            for value in values:
                yield Bad(path, {field: value}, field)
    for message, param in BAD_MESSAGES:
        yield Bad(CHAT, {"messages": [message]}, param)
