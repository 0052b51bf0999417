"""Turns a checked request into the sampling parameters that nodes get, and into the one grammar, or none,
that its fields make together, checked before any node computes. Rules that cross several fields are here.

A value that the request leaves out is the one that the model's makers recommend, or OpenAI's (`Defaults`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.api.answer_format import AnswerFormat, CallsAsked, OfferedTool
from tandem.api.lark import ANY_TEXT, JsonObject, json_schema, quoted
from tandem.api.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from tandem.api.openai.fields import RepetitionFields, ResponseFormat, SamplingFields, StructuredOutputs
from tandem.api.settings import ApiSettings, SamplingDefaults
from tandem.api.text.tenant_cache import CacheOwner, TenantCache
from tandem.api.text.tokenizer import Tokenizer, read_json
from tandem.base.errors import ConfigurationError, InvalidRequest
from tandem.base.shares import OneAtATime
from tandem.wire.requests import new_id
from tandem.wire.sampling import RepetitionDetection, SamplingParams

FILE = "generation_config.json"


class Defaults(msgspec.Struct, frozen=True):
    """OpenAI's defaults; parameters that OpenAI does not have are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # of an answer; a request may ask for more


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "max_new_tokens": (1, 2**31 - 1),
}


def defaults_of(config: ApiSettings) -> Defaults:
    """Returns the defaults to use. Raises ConfigurationError for a value that a request could not have
    either."""
    if config.sampling_defaults is SamplingDefaults.OPENAI:
        return Defaults()
    path = Path(config.tokenizer_path) / FILE
    declared = read_json(path)
    return Defaults(
        **{name: _in_range(path, name, value) for name, value in declared.items() if _means(name, value)}
    )


def _means(name: str, value: Any) -> bool:
    return name in _RANGES and value is not None


def _in_range(path: Path, name: str, value: Any) -> Any:
    low, high = _RANGES[name]
    whole = name in ("top_k", "max_new_tokens")
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not low <= value <= high
    ):
        raise ConfigurationError(
            f"{path}: {name} must be a {'whole ' if whole else ''}number from {low} to {high}, not {value!r}; "
            "router.sampling_defaults: openai ignores the file"
        )
    if name == "top_k":
        return max(0, value)
    return value if whole else float(value)


T = TypeVar("T")

_SEED_MASK = 2**63 - 1


def sampling_params(
    request: SamplingFields,
    tokenizer: Tokenizer,
    defaults: Defaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str | None = None,
    bad_words: list[list[int]],
    hidden_states: str | None = None,
) -> SamplingParams:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: must be at most the {max_tokens} tokens that may be generated, not {min_tokens}",
            "min_tokens",
        )
    if grammar is not None:
        _check_ends_with_grammar(request)
    stop_token_ids = request.stop_token_ids or []
    for token_id in stop_token_ids:
        if token_id >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is outside the vocabulary of {tokenizer.vocab_size} tokens",
                "stop_token_ids",
            )
    seed = request.seed if request.seed is not None else int(new_id(), 16)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=max(0, _first(request.top_k, defaults.top_k)),
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, tokenizer.vocab_size),
        bad_words=bad_words,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        seed=seed & _SEED_MASK,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        repetition_detection=_repetition(request.repetition_detection),
        hidden_states=hidden_states,
    )


def _repetition(asked: RepetitionFields | None) -> RepetitionDetection | None:
    if asked is None:
        return None
    if asked.min_pattern_size > asked.max_pattern_size:
        raise InvalidRequest(
            f"repetition_detection: min_pattern_size is {asked.min_pattern_size}, and max_pattern_size must not be less than that: it is "
            f"{asked.max_pattern_size}",
            "repetition_detection",
        )
    return RepetitionDetection(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)


def _first(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _check_ends_with_grammar(request: SamplingFields) -> None:
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise InvalidRequest(
                f"{name}: an answer that follows a grammar ends where the grammar does", name
            )


def of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Returns the sampling of one choice. The choices of a request differ only by their seeds."""
    if index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & _SEED_MASK)


def stop_strings(request: SamplingFields) -> list[str]:
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} must be a token id from 0 to {vocab_size - 1}", "logit_bias"
            )
        checked[int(key)] = value
    return checked


async def bad_word_ids(words: list[str] | None, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenizes each word twice, at the start of a text and after a space, because the model may write
    either."""
    if not words:
        return []
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    sequences: list[list[int]] = []
    for token_ids in await tokenizer.encode_all_async(texts, special=False):
        if token_ids and token_ids not in sequences:
            sequences.append(token_ids)
    return sequences


FREE_TEXT = f"start: {ANY_TEXT}"
MAX_GRAMMAR = 256 * 1024
_REMEMBERED = 256
# Checked grammars with their problem, "" for none. New grammars are checked in a thread, even short ones: a
# schema of a few hundred characters can take a tenth of a second.
_checked: TenantCache[str, str] = TenantCache(_REMEMBERED)
_checking = OneAtATime()

_SOURCE_LINES = re.compile(r"\n\s+\d+ \|.*", re.DOTALL)
_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")


async def grammar_of_format(wanted: ResponseFormat | None, owner: CacheOwner) -> str | None:
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise InvalidRequest(
                "response_format.json_schema: only with type 'json_schema'", "response_format.json_schema"
            )
        return None
    if wanted.type == "json_object":
        return f"start: %json {json_schema({'type': 'object'})}"
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema: is required", "response_format.json_schema")
    grammar = f"start: %json {json_schema(wanted.json_schema.schema)}"
    await check_grammar(grammar, "response_format.json_schema.schema", owner)
    return grammar


async def grammar_of_structured_outputs(
    wanted: StructuredOutputs | None, param: str, owner: CacheOwner
) -> str | None:
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: must have one of {', '.join(wanted.__struct_fields__)}",
            "structured_outputs",
        )
    # Building a grammar of a longer text would hold up others, and it is refused in any case.
    texts = [wanted.regex or "", wanted.grammar or "", *(wanted.choice or ())]
    place = f"{param}.{given[0]}" if param == "structured_outputs" else param
    _check_length(sum(map(len, texts)), place)
    if wanted.json is not None:
        grammar = f"start: %json {json_schema(wanted.json)}"
    elif wanted.regex is not None:
        grammar = f"start: /{_regex(wanted.regex)}/"
    elif wanted.choice is not None:
        grammar = "start: " + " | ".join(map(quoted, wanted.choice))
    else:
        grammar = wanted.grammar or ""
    await check_grammar(grammar, place, owner)
    return grammar


def _regex(text: str) -> str:
    if "\n" in text:
        text = text.replace("\n", "\\n")
    return regex_to_lark(text, "d")


async def check_grammar(grammar: str, param: str, owner: CacheOwner) -> None:
    """Raises InvalidRequest, naming the field, for a grammar that no node could compile."""
    _check_length(len(grammar), param)
    problem = _checked.get(owner, grammar)
    if problem is None:
        async with _checking.turn(owner.tenant):
            problem = await asyncio.to_thread(_problem, grammar) or ""
        _checked.put(owner, grammar, problem, 1)
    if problem:
        raise InvalidRequest(f"{param}: {problem}", param)


def _check_length(characters: int, param: str) -> None:
    if characters > MAX_GRAMMAR:
        raise InvalidRequest(f"{param}: must be at most {MAX_GRAMMAR} characters long", param)


def _problem(grammar: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not is_error:
        return None
    plain = _PLACE.sub("", _SOURCE_LINES.sub("", messages[0] if messages else "is no grammar"))
    return _PLACE.sub("", " ".join(plain.split()))[:500]


async def completion_grammar(request: SamplingFields, owner: CacheOwner) -> str | None:
    grammar, _ = await _answers_grammar(request, owner)
    return grammar


async def _answers_grammar(request: SamplingFields, owner: CacheOwner) -> tuple[str | None, str | None]:
    """Returns the grammar of an answer, and the name of the field that it comes from unless that is response_format."""
    grammar = await grammar_of_format(request.response_format, owner)
    wanted, param = await outputs_wanted(request)
    other = await grammar_of_structured_outputs(wanted, param, owner)
    if other is None:
        return grammar, None
    if grammar is not None:
        raise InvalidRequest(f"{param}: contradicts response_format; set one", param)
    return other, param


async def chat_grammar(
    request: ChatRequest,
    tools: Sequence[Tool] | None,
    written: AnswerFormat,
    tokenizer: Tokenizer,
    owner: CacheOwner,
    *,
    any_answer: bool = False,
) -> str | None:
    """Returns the grammar of a chat's answer, without the reasoning before it, or None. `tools`: None when
    the model may not call. `any_answer`: a grammar is needed, also of an answer that may be anything."""
    answer, param = await _answers_grammar(request, owner)
    if answer is not None:
        answer = written.answer_grammar(answer, tokenizer)
    if not tools or not written.reads_calls:
        return answer or (FREE_TEXT if any_answer else None)
    if param is not None:
        raise InvalidRequest(f"{param}: contradicts tools, unless tool_choice is 'none'", param)
    asked = _calls_asked(request, tools, any_answer=any_answer)
    grammar = written.calls_grammar(asked, answer, tokenizer)
    if grammar is not None:
        await check_grammar(grammar, "tools", owner)
    return grammar


def _calls_asked(request: ChatRequest, tools: Sequence[Tool], *, any_answer: bool) -> CallsAsked:
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None:
        tools = [tool for tool in tools if tool.function.name == named]
        if not tools:
            raise InvalidRequest(
                f"tool_choice.function.name: {named!r} is none of the tools", "tool_choice.function.name"
            )
    return CallsAsked(
        [_offered(tool) for tool in tools],
        must=named is not None or choice == "required",
        once=named is not None or request.parallel_tool_calls is False,
        any_answer=any_answer,
    )


def _offered(tool: Tool) -> OfferedTool:
    function = tool.function
    return OfferedTool(function.name, function.parameters or {}, bool(function.strict))


# The other servers' names of the fields of StructuredOutputs.
_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
}


async def outputs_wanted(request: SamplingFields) -> tuple[StructuredOutputs | None, str]:
    """Returns `structured_outputs`, also from the single fields of other clients, and the name of the field that was used."""
    given = [name for name in _OTHER_NAMES if getattr(request, name) is not None]
    if not given:
        return request.structured_outputs, "structured_outputs"
    others = given[1:] if request.structured_outputs is None else [*given[1:], "structured_outputs"]
    if others:
        raise InvalidRequest(f"{given[0]}: contradicts {others[0]}; set one", given[0])
    name, value = given[0], getattr(request, given[0])
    if _OTHER_NAMES[name] == "json" and isinstance(value, str):
        value = _object_in(value, name)
    elif name == "ebnf":
        value = await asyncio.to_thread(_lark_of, value)
    return msgspec.convert({_OTHER_NAMES[name]: value}, StructuredOutputs), name


_NO_OPTIONS = (
    "%llguidance {}\n"  # stands at the head of a whole grammar alone, and this one may become a part
)


def _lark_of(ebnf: str) -> str:
    _check_length(len(ebnf), "ebnf")
    try:
        return gbnf_to_lark(ebnf).removeprefix(_NO_OPTIONS)
    except Exception as error:  # the library's parser raises whatever its text leads it to
        raise InvalidRequest(
            f'ebnf: must be a grammar of rules such as \'root ::= "yes" | "no"\': {str(error)[:200]}', "ebnf"
        ) from None


def grammar_of_tokens(token_ids: Sequence[int], max_tokens: int, tokenizer: Tokenizer) -> str:
    """Returns a grammar of these tokens only. The answer ends early only if one of them ends answers."""
    largest = max(token_ids)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: {largest} is outside the vocabulary of {tokenizer.vocab_size} tokens",
            "allowed_token_ids",
        )
    tokens = f"<[{','.join(map(str, sorted(set(token_ids))))}]>"
    may_end = not tokenizer.end_ids.isdisjoint(token_ids)
    return f"start: ({tokens})*" if may_end else f"start: {tokens}{{{max_tokens}}}"


def _object_in(text: str, param: str) -> JsonObject:
    try:
        return msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param}: must be a JSON schema: {error}", param) from None
