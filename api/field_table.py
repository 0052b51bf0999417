"""What each path does with each field of a body: it obeys it, takes it without effect, or refuses it.

Obeyed are the fields of a path's request type. Refused is a field that would change the answer and that the path does not have:
ignoring it would answer a different question. A field on no list is ignored and named in the answer, unless
`router.unknown_fields` refuses it. docs/api.md shows the lists.

This module has the rules of all paths. Each path's own list stands beside its request type. The router joins the lists to one
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

RequestType = type[msgspec.Struct]

# Fields between router and nodes. A client that could set them could read other clients' memory.
INTERNAL: frozenset[str] = frozenset({"kv_transfer_params", "transfer", "reply_to", "output_token_ids", "lora"})

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


class FieldRefusal(msgspec.Struct, frozen=True):
    """`instead`: what is right. `harmless`: the values, besides null and false, that ask for what is so anyway."""

    instead: str
    harmless: tuple[Any, ...] = ()


class PathFields(msgspec.Struct, frozen=True):
    """One path. `generates`: the answer is text, so it may refuse what other such paths have."""

    path: str
    request: RequestType
    generates: bool = False
    refused: Mapping[str, FieldRefusal] = {}
    accepted: Mapping[str, str] = {}  # without effect, and why


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
            "skip_reading_prefix_cache",
        ),
        (False,),
    ),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words", "stop_token_ids", "tools", "documents", "include"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("suffix", "system", "instructions"), ("",)),
}  # fmt: skip


class FieldTable:
    def __init__(self, paths: Iterable[PathFields]) -> None:
        self.paths: Mapping[RequestType, PathFields] = {one.request: one for one in paths}

    def takes_without_effect(self, kind: RequestType, name: str) -> bool:
        return name in ACCEPTED or name in self.paths[kind].accepted

    def refusal_of(self, kind: RequestType, name: str, value: Any) -> str | None:
        """Returns why a path refuses a field that its request type lacks, or None."""
        here = self.paths[kind]
        refusal = here.refused.get(name) or REFUSED.get(name)
        if refusal is not None:
            harmless = value is None or (value is False and name not in _FALSE_MATTERS)
            if harmless or _is_one_of(value, (*refusal.harmless, *_NEUTRAL.get(name, ()))):
                return None
            return f"{name}: not supported; {refusal.instead}"
        if not here.generates or value is None or _is_one_of(value, _NEUTRAL.get(name, ())):
            return None
        having = [other.path for other in self.generating if name in other.request.__struct_fields__]
        if not having:
            return None
        return f"{name}: {here.path} does not have it; {' and '.join(having)} {'do' if len(having) > 1 else 'does'}"

    @property
    def generating(self) -> list[PathFields]:
        return [one for one in self.paths.values() if one.generates]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in docs/api.md: the fields that are refused, and those without effect."""
        yield "| field | where | instead |"
        yield "|---|---|---|"
        for name, refusal in REFUSED.items():
            yield f"| `{name}` | everywhere | {refusal.instead} |"
        for one in self.paths.values():
            for name, refusal in one.refused.items():
                yield f"| `{name}` | `{one.path}` | {refusal.instead} |"
        for name, why in ACCEPTED.items():
            yield f"| `{name}` | everywhere | no effect: {why} |"
        for one in self.paths.values():
            for name, why in one.accepted.items():
                yield f"| `{name}` | `{one.path}` | no effect: {why} |"


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Compares with the types, because `True == 1` and `False == 0`."""
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in harmless)
