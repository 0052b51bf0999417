"""Turns a checked request into a plan: the tokenized sequences to generate, how their choices are read, and
what they used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from tandem.api import wings
from tandem.api.answer_format import AnswerFormat, PlainText
from tandem.api.lives import ReadableLives
from tandem.api.openai.answer import Choice, event
from tandem.api.openai.chat_request import ChatRequest, thinking_budget
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.fields import SamplingFields, StreamOptions
from tandem.api.openai.prompts import (
    PromptTooLong,
    ServedModel,
    chat_prompt,
    encoded,
    prompt_ids,
    prompts_of,
    tools_to_call,
    truncated,
)
from tandem.api.openai.sampling import (
    bad_word_ids,
    chat_grammar,
    completion_grammar,
    grammar_of_tokens,
    of_choice,
    sampling_params,
    stop_strings,
)
from tandem.api.pieces import AnswerReader, NotesCalls, ToolSchemas
from tandem.api.sequence import SequenceSpec, TraceNotes
from tandem.api.settings import ApiSettings
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest
from tandem.wire.embeds import PLACEHOLDER, PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
_LONGEST_FOLDER = 200  # file systems take names of 255 bytes


class Caller(msgspec.Struct, frozen=True):
    """What generation must know about the caller."""

    label: str
    deadline: float
    cache_salt: Callable[[str | None], str | None]
    session: str | None
    job_id: str | None = None
    is_last_step: bool = False
    most_urgent: int | None = None  # the lowest priority number that it may ask for; None: any
    trace: TraceNotes | None = None
    arrived: float | None = None
    key: str | None = None  # its key's name; None: it needs none

    def file(self, name: str | None) -> str | None:
        """The path of a file that the caller names. Each key's files are in a folder of its own, so that no key replaces another's."""
        if name is None or self.key is None:
            return name
        return f"{_folder_of(self.key)}/{name}"

    def cache_owner(self, cache_salt: str | None) -> CacheOwner:
        """Whose the request's entries in this router's caches are: apart like its KV blocks."""
        return CacheOwner(self.cache_salt(None) or "", self.cache_salt(cache_salt) or "")

    def priority(self, asked: int | None) -> int:
        wanted = asked or 0
        return wanted if self.most_urgent is None else max(wanted, self.most_urgent)


def _folder_of(key: str) -> str:
    """Key names are any text: returns it as a file's name, a distinct one for each."""
    folder = quote(key, safe="", errors="surrogatepass")
    if folder.startswith("."):
        folder = "%2E" + folder[1:]
    if 0 < len(folder) <= _LONGEST_FOLDER:
        return folder
    return "%" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class GenerationPlan(msgspec.Struct, frozen=True):
    """What a request generates, and how its answer is shown."""

    specs: list[SequenceSpec]  # prompt by prompt, each with all its choices
    prompts: list[list[int]]
    prompt_texts: list[str]  # the echoed prompts; "" without echo
    choices_per_prompt: int  # choices that are generated
    keep: int  # choices that are shown; fewer with best_of
    stops: list[str]
    show_logprobs: bool
    include_stop: bool
    skip_special: bool
    prompt_logprobs: int | None = None  # how many alternatives of each prompt token are shown
    return_token_ids: bool = False
    format: AnswerFormat | None = None  # how the model writes a chat's answer
    chat_prompt: str = ""
    tools: ToolSchemas | None = None  # None when the model may not call tools
    must_call: bool = False  # the grammar allows calls alone
    called: list[str] | None = (
        # Filled with the tools that a turn of a job calls, while its answer is read. None: not such a turn,
        # or not parsed for calls.
        None
    )
    include_usage: bool = False  # a stream ends with it though the request does not ask
    only_echo: bool = False  # with max_tokens 0, the one token that a node always generates is not shown

    def choices(self, generation: ReadableLives, tokenizer: Tokenizer) -> list[Choice]:
        return [
            Choice(
                index,
                life,
                tokenizer,
                self.stops,
                include_stop=self.include_stop,
                skip_special=self.skip_special,
                shown_marks=self.format.marks if self.format is not None else (),
                show_logprobs=self.show_logprobs,
                show_token_ids=self.return_token_ids,
                text_offset=len(self.prompt_texts[index // self.choices_per_prompt]),
            )
            for index, life in enumerate(generation.lives)
        ]

    def reader(self) -> AnswerReader | None:
        """Returns the reader of one choice's text, or None when the text is shown as it is."""
        reader = (
            self.format.reader(self.chat_prompt, self.tools, must_call=self.must_call)
            if self.format is not None
            else None
        )
        return NotesCalls(reader, self.called) if reader is not None and self.called is not None else reader

    def reasoning_tokens(self, choices: Sequence[Choice]) -> int | None:
        """Counts the reasoning tokens of the choices; None when the model's reasoning format is unknown."""
        if self.format is None:
            return None
        counts = [
            self.format.reasoning_tokens(choice.token_ids, self.chat_prompt, choice.tokenizer)
            for choice in choices
        ]
        return None if None in counts else sum(count or 0 for count in counts)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Counts each prompt once, however many choices it has, and every generated token, also those of
        choices that best_of dropped."""
        completion = 0 if self.only_echo else sum(choice.completion_tokens for choice in choices)
        cached = sum(
            choices[first].life.cached_tokens or 0
            for first in range(0, len(choices), self.choices_per_prompt)
        )
        figures: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if (reasoning := self.reasoning_tokens(choices)) is not None:
            figures["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return figures

    def shown_prompt(self, index: int) -> list[int]:
        """Returns one prompt's tokens; an empty list for a prompt of embeddings."""
        return (
            []
            if self.specs[index * self.choices_per_prompt].facts.embeds is not None
            else self.prompts[index]
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class StreamedUsage:
    """Implements `stream_options.include_usage`: null in every event, and the figures in an event of their
    own at the end."""

    def __init__(
        self, options: StreamOptions | None, plan: GenerationPlan, choices: Sequence[Choice]
    ) -> None:
        self._included = plan.include_usage or bool(options and options.include_usage)
        self.continuous = self._included and bool(options and options.continuous_usage_stats)
        self._plan = plan
        self._choices = choices
        self.null = b',"usage":null' if self._included else b""

    def field(self) -> dict[str, Any]:
        if self.continuous:
            return {"usage": self._plan.usage(self._choices)}
        return {"usage": None} if self._included else {}

    def closing(self, head: Mapping[str, Any]) -> bytes:
        if not self._included:
            return b""
        return event({**head, "choices": [], "usage": self._plan.usage(self._choices)})


async def plan_completion(request: CompletionRequest, model: ServedModel, caller: Caller) -> GenerationPlan:
    if request.suffix:
        raise InvalidRequest("suffix: this model does not fill in the middle; leave it out", "suffix")
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise InvalidRequest(f"best_of: must be at least n ({n}), not {best_of}", "best_of")
    if best_of > n and request.stream:
        raise InvalidRequest(
            "best_of: all of them must be complete to compare them, so not with stream", "best_of"
        )
    echo = bool(request.echo)
    asked = _asked_tokens(request)
    max_tokens = DEFAULT_COMPLETION_TOKENS if asked is None else asked
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens: must be at least 1, unless echo is set", "max_tokens")
    _check_stream_options(request)
    embeds = await wings.embeds_of(request, model.config)
    prompts = prompts_of(request.prompt, "prompt") if embeds is None else []
    _check_counts(len(prompts if embeds is None else embeds), best_of, model.config)
    owner = caller.cache_owner(request.cache_salt)
    token_ids = [[PLACEHOLDER] * each.count for each in embeds or ()] + [
        truncated(
            await prompt_ids(
                prompt,
                "prompt",
                model.tokenizer,
                _context_for(request, model),
                special=request.add_special_tokens is not False,
                owner=owner,
            ),
            request.truncate_prompt_tokens,
            max_tokens,
            model.max_model_len,
        )
        for prompt in prompts
    ]
    shows = request.logprobs is not None
    ranks = best_of > n and not shows  # the best choice is the likeliest, so log-probabilities are needed
    return _plan(
        request,
        model,
        caller,
        token_ids,
        [await _echo_text(prompt, model) if echo else "" for prompt in prompts or token_ids],
        max_tokens,
        n=n,
        best_of=best_of,
        logprobs=0 if ranks else request.logprobs,
        echo_logprobs=request.logprobs if echo else None,
        show_logprobs=shows,
        grammar=await completion_grammar(request, owner),
        bad_words=await bad_word_ids(request.bad_words, model.tokenizer),
        embeds=embeds,
    )


async def plan_chat(request: ChatRequest, model: ServedModel, caller: Caller) -> GenerationPlan:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    max_tokens = _asked_tokens(request)
    _check_stream_options(request)
    n = request.n or 1
    _check_counts(1, n, model.config)
    tools = tools_to_call(request)
    _check_tools(request, model)
    # First, because it refuses what is too long before anything looks into it.
    prompt = await chat_prompt(request, model, _context_for(request, model))
    owner = caller.cache_owner(request.cache_salt)
    text, images = prompt.text, prompt.images
    budget = _reasoning_budget(request, text, model)
    grammar = await chat_grammar(
        request, tools, model.format, model.tokenizer, owner, any_answer=budget is not None
    )
    if images is not None and request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: not with images, of which a part would be cut off",
            "truncate_prompt_tokens",
        )
    # The template writes the special tokens itself, unless the client knows that it does not.
    token_ids = await encoded(
        text,
        "messages",
        model.tokenizer,
        _context_for(request, model),
        special=bool(request.add_special_tokens),
        owner=owner,
    )
    if grammar is not None:
        grammar = model.format.after_reasoning(grammar, text, model.tokenizer, budget)
    if not token_ids:
        raise InvalidRequest("messages: the chat template makes an empty prompt of them", "messages")
    token_ids = truncated(token_ids, request.truncate_prompt_tokens, max_tokens, model.max_model_len)
    return _plan(
        request,
        model,
        caller,
        [token_ids],
        [""],
        max_tokens,
        n=n,
        best_of=n,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        show_logprobs=bool(request.logprobs),
        answer_format=model.format,
        chat_prompt=text,
        media=images.features(token_ids) if images is not None else None,
        images=images.files if images is not None else None,
        tools={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
        must_call=tools is not None and request.tool_choice not in (None, "auto"),
        grammar=grammar,
        bad_words=await bad_word_ids(request.bad_words, model.tokenizer),
    )


def _plan(
    request: SamplingFields,
    model: ServedModel,
    caller: Caller,
    prompts: list[list[int]],
    prompt_texts: list[str],
    max_tokens: int | None,
    *,
    n: int,
    best_of: int,
    logprobs: int | None,
    echo_logprobs: int | None = None,
    show_logprobs: bool,
    answer_format: AnswerFormat | None = None,
    chat_prompt: str = "",
    media: list[MediaFeature] | None = None,
    images: list[bytes] | None = None,
    tools: ToolSchemas | None = None,
    must_call: bool = False,
    grammar: str | None = None,
    bad_words: list[list[int]],
    embeds: list[PromptEmbeds] | None = None,
) -> GenerationPlan:
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    if request.hidden_states is not None and (len(prompts) > 1 or best_of > 1):
        raise InvalidRequest(
            "hidden_states: names one file, so there must be one prompt and one choice", "hidden_states"
        )
    if request.allowed_token_ids is not None and grammar is not None:
        raise InvalidRequest(
            "allowed_token_ids: contradicts the grammar that the answer has to follow", "allowed_token_ids"
        )
    shown = [count for count in (echo_logprobs, request.prompt_logprobs) if count is not None]
    if shown and logprobs is None:
        # with log-probabilities wanted, the answer waits for the prefill node's report, which brings the
        # prompt's
        logprobs = 0
    context = model.max_model_len
    specs: list[SequenceSpec] = []
    # otherwise there is no single answer that the next turn continues
    is_turn = best_of == 1 and len(prompts) == 1
    job_id = caller.job_id if is_turn else None
    reads_calls = answer_format is not None and answer_format.reads_calls
    sampling: SamplingParams | None = None
    for place, prompt in enumerate(prompts):
        rows = embeds[place] if embeds is not None else None
        features = rows.features() if rows is not None else media or []
        # Without a node the context length is unknown, and the dispatcher will answer that there is no node.
        room = context - len(prompt) if context is not None else max_tokens or DEFAULT_COMPLETION_TOKENS
        _check_context(request, len(prompt), max_tokens, context)
        # A node always generates a token. With max_tokens=0 the client wants the prompt's log-probabilities.
        wanted = max(
            1, min(room, model.defaults.max_new_tokens or room) if max_tokens is None else max_tokens
        )
        if sampling is None or sampling.max_tokens != wanted:
            allowed = request.allowed_token_ids
            sampling = sampling_params(
                request,
                model.tokenizer,
                model.defaults,
                max_tokens=wanted,
                logprobs=logprobs,
                prompt_logprobs=max(shown, default=None),
                grammar=grammar_of_tokens(allowed, wanted, model.tokenizer) if allowed else grammar,
                bad_words=bad_words,
                hidden_states=caller.file(request.hidden_states),
            )
        for index in range(best_of):
            specs.append(
                SequenceSpec(
                    label=caller.label,
                    facts=RequestFacts(
                        prompt_token_ids=prompt,
                        sampling=of_choice(sampling, index),
                        priority=caller.priority(request.priority),
                        cache_salt=caller.cache_salt(request.cache_salt),
                        lora=model.adapter_of(request.model),
                        media=features,
                        images=images or [],
                        embeds=rows,
                        job_id=job_id,
                        is_last_step=caller.is_last_step,
                    ),
                    deadline=caller.deadline,
                    session=caller.session,
                    trace=caller.trace,
                    arrived=caller.arrived,
                )
            )
    return GenerationPlan(
        specs=specs,
        prompts=prompts,
        prompt_texts=prompt_texts,
        choices_per_prompt=best_of,
        keep=n,
        stops=stop_strings(request),
        show_logprobs=show_logprobs,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        prompt_logprobs=request.prompt_logprobs,
        return_token_ids=bool(request.return_token_ids),
        format=answer_format,
        chat_prompt=chat_prompt,
        tools=tools,
        must_call=must_call,
        called=[] if job_id is not None and reads_calls else None,
        include_usage=model.config.include_usage,
        only_echo=max_tokens == 0,
    )


def _check_context(
    request: SamplingFields, prompt_tokens: int, max_tokens: int | None, context: int | None
) -> None:
    if context is None:
        return
    room = context - prompt_tokens
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    if room < 1:
        raise PromptTooLong(
            f"{param}: has {prompt_tokens} tokens; the model's context is {context}, and at least one must be left",
            param,
        )
    if max_tokens is not None and max_tokens > room:
        raise PromptTooLong(
            f"max_tokens: {max_tokens} and the {prompt_tokens} tokens of {param} "
            f"are together more than the model's context of {context}",
            "max_tokens",
        )


def _asked_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    newer = request.max_completion_tokens
    if newer is not None and request.max_tokens not in (None, newer):
        raise InvalidRequest(
            "max_tokens: differs from max_completion_tokens, its newer name; set one", "max_tokens"
        )
    return request.max_tokens if newer is None else newer


def _reasoning_budget(request: ChatRequest, prompt: str, model: ServedModel) -> int | None:
    """Returns the most tokens of reasoning. None: any number, or the model does not reason here."""
    budget, param = thinking_budget(request)
    most = _asked_tokens(request)
    if budget is None or (most is not None and budget >= most):
        return None
    try:
        return budget if model.format.bounds_reasoning(prompt, model.tokenizer) else None
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error}", param) from None


def _check_tools(request: ChatRequest, model: ServedModel) -> None:
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice != "none":
            raise InvalidRequest("tool_choice: needs tools", "tool_choice")
        return
    if choice != "none" and isinstance(model.format, PlainText):
        raise wings.no_calls()
    if choice not in (None, "none", "auto") and not model.format.reads_calls:
        raise InvalidRequest(
            "tool_choice: must be 'none' or 'auto', because this server reads no calls (router.tool_format: none)",
            "tool_choice",
        )


def _check_counts(prompts: int, choices: int, config: ApiSettings) -> None:
    limits = config.limits
    if prompts > limits.prompts_per_request:
        raise InvalidRequest(f"prompt: at most {limits.prompts_per_request} prompts, not {prompts}", "prompt")
    if prompts * choices > limits.choices_per_request:
        raise InvalidRequest(
            f"n: at most {limits.choices_per_request} choices in one request, not {prompts * choices}", "n"
        )


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only with stream", "stream_options")


def _context_for(request: SamplingFields, model: ServedModel) -> int | None:
    """Returns the longest allowed prompt, or None when the prompt will be truncated."""
    return model.max_model_len if request.truncate_prompt_tokens is None else None


async def _echo_text(prompt: str | list[int], model: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else await model.tokenizer.decode_async(prompt)
