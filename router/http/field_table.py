"""What each path does with each field of a body: it obeys it, takes it without effect, or refuses it.

Obeyed are the fields of a path's request type. Refused is a field that would change the answer and that the path does not have:
ignoring it would answer a different question. A field on no list is ignored and named in the answer, unless
`router.unknown_fields` refuses it. docs/api.md shows the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.api.anthropic.messages_request import CountRequest, MessagesRequest
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.prompts import CompletionRequest
from tandem.api.openai.text_request import DetokenizeRequest, TokenizeRequest
from tandem.api.openai.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest
from tandem.api.responses.responses_request import ResponsesRequest

RequestType = type[msgspec.Struct]

GENERATING: Mapping[RequestType, str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
}
PATHS: Mapping[RequestType, str] = {
    **GENERATING,
    CountRequest: "/v1/messages/count_tokens",
    EmbeddingRequest: "/v1/embeddings",
    ScoreRequest: "/v1/score",
    RerankRequest: "/v1/rerank",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}

# Fields between router and nodes. A client that could set them could read other clients' memory.
INTERNAL: frozenset[str] = frozenset(
    {"kv_transfer_params", "transfer", "reply_to", "output_token_ids", "lora"}
)

# Fields of other servers' APIs that do not change what is answered: taken, and not acted on.
ACCEPTED: Mapping[str, str] = {
    "user": "an end user's id; not used",
    "metadata": "not stored",
    "store": "only responses are kept",
    "service_tier": "there is one tier",
    "safety_identifier": "not used",
    "prompt_cache_retention": "the cache keeps what is used",
    "prediction": "only ever a hint for speed",
    "verbosity": "a model's own matter; pass it in chat_template_kwargs if its template knows it",
}

_NO_REASONING = "a text is completed without the chat template, so without its reasoning"
# The same at one path alone.
ACCEPTED_AT: Mapping[RequestType, Mapping[str, str]] = {
    CompletionRequest: {
        "reasoning_effort": _NO_REASONING,
        "include_reasoning": _NO_REASONING,
        "enable_thinking": _NO_REASONING,
        "thinking": _NO_REASONING,
        "prompt_cache_key": "use the header x-session-id",
    },
    MessagesRequest: {"prompt_cache_key": "use the header x-session-id"},
}


class FieldRefusal(msgspec.Struct, frozen=True):
    """`instead`: what is right. `harmless`: the values, besides null and false, that ask for what is so anyway."""

    instead: str
    harmless: tuple[Any, ...] = ()


_SAMPLING = "there is no such sampling here; top_p, top_k and min_p are near to it"
_FIELDS_OF_BODY = "send its fields in the body itself"
_OPERATORS = "the operator sets it (router.chat_template)"
# Fields that change an answer elsewhere, and that no path here has.
REFUSED: Mapping[str, FieldRefusal] = {
    "functions": FieldRefusal("use tools"),
    "function_call": FieldRefusal("use tool_choice"),
    "audio": FieldRefusal("this server answers in text"),
    "web_search_options": FieldRefusal("this server does not search the web"),
    "mcp_servers": FieldRefusal("this server calls no MCP servers; offer their tools as tools", ([],)),
    "chat_template": FieldRefusal(_OPERATORS),
    "use_beam_search": FieldRefusal("answers are sampled; n and best_of give several"),
    "num_beams": FieldRefusal("answers are sampled; n and best_of give several", (1,)),
    "typical_p": FieldRefusal(_SAMPLING, (1,)),
    "top_a": FieldRefusal(_SAMPLING, (0,)),
    "tfs": FieldRefusal(_SAMPLING, (1,)),
    "mirostat": FieldRefusal(_SAMPLING, (0,)),
    "xtc_probability": FieldRefusal(_SAMPLING, (0,)),
    "dry_multiplier": FieldRefusal("use repetition_penalty or repetition_detection", (0,)),
    "no_repeat_ngram_size": FieldRefusal("use repetition_penalty or repetition_detection", (0,)),
    "logits_processors": FieldRefusal("this server runs no code of clients; logit_bias and structured_outputs are there", ([],)),
    "custom_logit_processor": FieldRefusal("this server runs no code of clients; logit_bias and structured_outputs are there", ("",)),
    "custom_params": FieldRefusal("they are for SGLang's custom_logit_processor; this server runs no code of clients", ({},)),
    "vllm_xargs": FieldRefusal("they are for vLLM's plugins, which are not here", ({},)),
    "extra_body": FieldRefusal(f"it is an argument of OpenAI's Python client; {_FIELDS_OF_BODY}", ({},)),
    "nvext": FieldRefusal(f"it is for Dynamo; {_FIELDS_OF_BODY}", ({},)),
    "sampling_params": FieldRefusal(f"it is for SGLang's /generate; {_FIELDS_OF_BODY}", ({},)),
    "structural_tag": FieldRefusal("use structured_outputs.grammar"),
    "stop_regex": FieldRefusal("use stop", ([], "")),
    "no_stop_trim": FieldRefusal("use include_stop_str_in_output"),
    "max_new_tokens": FieldRefusal("use max_tokens"),
    "min_new_tokens": FieldRefusal("use min_tokens", (0,)),
    "return_hidden_states": FieldRefusal("use hidden_states"),
    "mm_processor_kwargs": FieldRefusal("the model's own files say how images are read", ({},)),
    "input_type": FieldRefusal("put the model's own words for it before the texts", ("",)),
    "instruction": FieldRefusal("put it before the texts", ("",)),
    "normalize": FieldRefusal("the model's files say whether its vectors have length 1", (True,)),
    "embed_dtype": FieldRefusal("numbers are float32", ("float32",)),
    "max_tokens_per_doc": FieldRefusal("use truncate_prompt_tokens"),
    "max_chunks_per_doc": FieldRefusal("each document is one text", (1,)),
}  # fmt: skip
# False asks for something else than leaving the field out.
_FALSE_MATTERS: frozenset[str] = frozenset({"normalize"})
REFUSED_AT: Mapping[RequestType, Mapping[str, FieldRefusal]] = {
    ChatRequest: {
        "echo": FieldRefusal("not in a chat; continue_final_message continues a message, which the client has"),
        "best_of": FieldRefusal("only in completions; n gives several answers", (1,)),
        "reasoning": FieldRefusal("use reasoning_effort"),
        "max_output_tokens": FieldRefusal("use max_completion_tokens"),
        "stop_sequences": FieldRefusal("use stop"),
        "system": FieldRefusal("send a message of the role system"),
        "instructions": FieldRefusal("send a message of the role system"),
        "text": FieldRefusal("use response_format"),
        "output_config": FieldRefusal("use response_format and reasoning_effort"),
    },
    CompletionRequest: {
        "messages": FieldRefusal("send prompt, or a chat to /v1/chat/completions"),
        "max_completion_tokens": FieldRefusal("use max_tokens"),
        "max_output_tokens": FieldRefusal("use max_tokens"),
        "stop_sequences": FieldRefusal("use stop"),
        "top_logprobs": FieldRefusal("logprobs is their number in a completion", (0,)),
    },
    ResponsesRequest: {
        "messages": FieldRefusal("send input"),
        "response_format": FieldRefusal("use text.format"),
        "max_tokens": FieldRefusal("use max_output_tokens"),
        "max_completion_tokens": FieldRefusal("use max_output_tokens"),
        "reasoning_effort": FieldRefusal("use reasoning.effort"),
        "system": FieldRefusal("use instructions"),
        "stop_sequences": FieldRefusal("use stop"),
        "lora_path": FieldRefusal("name the adapter as model"),
        "thinking": FieldRefusal("use enable_thinking and reasoning.effort"),
        **dict.fromkeys(
            (
                "regex", "json_schema", "ebnf",
                "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            ),
            FieldRefusal("use structured_outputs"),
        ),
    },
    MessagesRequest: {
        "response_format": FieldRefusal("use output_config.format"),
        "max_completion_tokens": FieldRefusal("use max_tokens"),
        "max_output_tokens": FieldRefusal("use max_tokens"),
        "stop": FieldRefusal("use stop_sequences", ([], "")),
        "reasoning_effort": FieldRefusal("use output_config.effort"),
        "enable_thinking": FieldRefusal("use thinking"),
        "thinking_token_budget": FieldRefusal("use thinking.budget_tokens"),
        "instructions": FieldRefusal("use system"),
        "lora_path": FieldRefusal("name the adapter as model"),
    },
    TokenizeRequest: {
        "truncate_prompt_tokens": FieldRefusal("all of a prompt's tokens are listed"),
        "reasoning_effort": FieldRefusal("use chat_template_kwargs"),
        "enable_thinking": FieldRefusal("use chat_template_kwargs"),
        "input": FieldRefusal("use prompt"),
    },
    EmbeddingRequest: {"messages": FieldRefusal("send input")},
    ScoreRequest: {"dimensions": FieldRefusal("texts are compared by whole vectors")},
    RerankRequest: {"dimensions": FieldRefusal("texts are compared by whole vectors")},
}  # fmt: skip

# Of fields that another generating path has: the values that ask for what is so anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "priority": (0,),
    "truncation": ("disabled",),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning"), (True,)),
    **dict.fromkeys(
        (
            "logprobs", "echo", "stream", "ignore_eos", "include_stop_str_in_output", "return_token_ids",
            "return_tokens_as_token_ids", "background", "is_last_step", "continue_final_message",
        ),
        (False,),
    ),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words", "stop_token_ids", "tools", "documents", "include"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("suffix", "system", "instructions"), ("",)),
}  # fmt: skip


def takes_without_effect(kind: RequestType, name: str) -> bool:
    return name in ACCEPTED_AT.get(kind, {}) or name in ACCEPTED


def refusal_of(kind: RequestType, name: str, value: Any) -> str | None:
    """Returns why a path refuses a field that its request type lacks, or None."""
    refusal = REFUSED_AT.get(kind, {}).get(name) or REFUSED.get(name)
    if refusal is not None:
        harmless = value is None or (value is False and name not in _FALSE_MATTERS)
        if harmless or _is_one_of(value, (*refusal.harmless, *_NEUTRAL.get(name, ()))):
            return None
        return f"{name}: not supported; {refusal.instead}"
    if kind not in GENERATING or value is None or _is_one_of(value, _NEUTRAL.get(name, ())):
        return None
    having = [path for other, path in GENERATING.items() if name in other.__struct_fields__]
    if not having:
        return None
    return f"{name}: {GENERATING[kind]} does not have it; {' and '.join(having)} {'do' if len(having) > 1 else 'does'}"


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Compares with the types, because `True == 1` and `False == 0`."""
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in harmless)


def table() -> Iterator[str]:
    """Yields the lines of the table in docs/api.md: the fields that are refused, and those without effect."""
    yield "| field | where | instead |"
    yield "|---|---|---|"
    for name, refusal in REFUSED.items():
        yield f"| `{name}` | everywhere | {refusal.instead} |"
    for kind, refused in REFUSED_AT.items():
        for name, refusal in refused.items():
            yield f"| `{name}` | `{PATHS[kind]}` | {refusal.instead} |"
    for name, why in ACCEPTED.items():
        yield f"| `{name}` | everywhere | no effect: {why} |"
    for kind, accepted in ACCEPTED_AT.items():
        for name, why in accepted.items():
            yield f"| `{name}` | `{PATHS[kind]}` | no effect: {why} |"
