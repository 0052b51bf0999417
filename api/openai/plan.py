"""Turns a checked request into a plan: the tokenized sequences to generate, and how their choices are read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.api import wings
from tandem.api.answer_format import PlainText
from tandem.api.openai.answer import LoopTurn
from tandem.api.openai.caller import Caller
from tandem.api.openai.chat_prompt import TemplateInput, chat_prompt, template_variables, tools_to_call
from tandem.api.openai.chat_request import ChatRequest, thinking_budget
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.fields import SamplingFields
from tandem.api.openai.generation_plan import ChatReading, GenerationPlan
from tandem.api.openai.grammars import chat_grammar, completion_grammar, grammar_of_tokens
from tandem.api.openai.prompts import PromptTooLong, encoded, prompt_ids, prompts_of, truncated
from tandem.api.openai.sampling import Sampled, bad_word_ids, of_choice, sampling_params, stop_strings
from tandem.api.openai.served_model import ServedModel
from tandem.api.sequence import SequenceSpec
from tandem.api.settings import ApiSettings
from tandem.base.errors import InvalidRequest
from tandem.wire.embeds import PLACEHOLDER
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


class _Asked(msgspec.Struct, frozen=True):
    """What a request asks for each of its prompts, in the terms of both endpoints."""

    choices: int  # that are generated
    keep: int  # that are shown
    show_logprobs: bool
    max_tokens: int | None
    sampled: Sampled
    texts: Sequence[str]
    chat: ChatReading | None = None


async def plan_completion(request: CompletionRequest, model: ServedModel, caller: Caller) -> GenerationPlan:
    n, best_of = _choices_of(request)
    max_tokens = _completion_tokens(request)
    _check_stream_options(request)
    embeds = await wings.embeds_of(request, model.config)
    given = prompts_of(request.prompt, "prompt") if embeds is None else []
    _check_counts(len(given if embeds is None else embeds), best_of, model.config)
    owner = caller.cache_owner(request.cache_salt)
    context, special = _context_for(request, model), request.add_special_tokens is not False
    prompts = [[PLACEHOLDER] * each.count for each in embeds or ()]
    turn = LoopTurn()
    for prompt in given:
        ids = await prompt_ids(prompt, "prompt", model.tokenizer, context, special=special, owner=owner)
        prompts.append(truncated(ids, request.truncate_prompt_tokens, max_tokens, model.max_model_len))
        await turn.pass_on()  # each short prompt is tokenized here, which takes a millisecond or more
    # The best choice is the likeliest, so log-probabilities are needed.
    logprobs = 0 if best_of > n and request.logprobs is None else request.logprobs
    asked = _Asked(
        choices=best_of,
        keep=n,
        show_logprobs=request.logprobs is not None,
        max_tokens=max_tokens,
        texts=[await _echo_text(prompt, model) if request.echo else "" for prompt in given or prompts],
        sampled=_sampled(
            request,
            caller,
            logprobs,
            request.logprobs if request.echo else None,
            await completion_grammar(request, owner),
            await bad_word_ids(request.bad_words, model.tokenizer),
        ),
    )
    facts = _facts(request, model, caller, asked, prompts)
    if embeds is not None:
        facts = [
            msgspec.structs.replace(one, embeds=rows, media=rows.features())
            for one, rows in zip(facts, embeds, strict=True)
        ]
    return _plan(request, model, caller, asked, facts)


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
    chat = TemplateInput.of(request, tools, template_variables(request))
    owner = caller.cache_owner(request.cache_salt)
    text, images = await chat_prompt(model, chat, _context_for(request, model), owner.tenant)
    budget = _reasoning_budget(request, text, model)
    grammar = await chat_grammar(request, tools, model, owner, any_answer=budget is not None)
    if images is not None and request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: not with images, of which a part would be cut off", "truncate_prompt_tokens"
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
    media = images.features(token_ids) if images is not None else []
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    bad_words = await bad_word_ids(request.bad_words, model.tokenizer)
    asked = _Asked(
        choices=n,
        keep=n,
        show_logprobs=bool(request.logprobs),
        max_tokens=max_tokens,
        texts=("",),
        sampled=_sampled(request, caller, logprobs, None, grammar, bad_words),
        chat=ChatReading(
            model.format,
            text,
            tools={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
            must_call=tools is not None and request.tool_choice not in (None, "auto"),
            called=[] if n == 1 and caller.job_id is not None and model.format.reads_calls else None,
        ),
    )
    facts = _facts(request, model, caller, asked, [token_ids])
    if images is not None:
        facts = [msgspec.structs.replace(facts[0], media=media, images=images.files)]
    return _plan(request, model, caller, asked, facts)


def _sampled(
    request: SamplingFields,
    caller: Caller,
    logprobs: int | None,
    echo_logprobs: int | None,
    grammar: str | None,
    bad_words: list[list[int]],
) -> Sampled:
    shown = [count for count in (echo_logprobs, request.prompt_logprobs) if count is not None]
    if shown and logprobs is None:
        # with log-probabilities wanted, the answer waits for the prefill node's report, which brings the
        # prompt's
        logprobs = 0
    hidden_states = caller.file(request.hidden_states)
    return Sampled(logprobs, max(shown, default=None), grammar, bad_words, hidden_states)


def _facts(
    request: SamplingFields, model: ServedModel, caller: Caller, asked: _Asked, prompts: list[list[int]]
) -> list[RequestFacts]:
    """Checks what the prompts' number and lengths have to do with. Returns each prompt's facts, with its first choice's seed."""
    is_alone = asked.choices == 1 and len(prompts) == 1
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    if request.hidden_states is not None and not is_alone:
        raise InvalidRequest(
            "hidden_states: names one file, so there must be one prompt and one choice", "hidden_states"
        )
    sampled, allowed = asked.sampled, request.allowed_token_ids
    if allowed is not None and sampled.grammar is not None:
        raise InvalidRequest(
            "allowed_token_ids: contradicts the grammar that the answer has to follow", "allowed_token_ids"
        )
    facts: list[RequestFacts] = []
    sampling: SamplingParams | None = None
    for at, prompt in enumerate(prompts):
        most = _most_tokens(request, model, len(prompt), asked.max_tokens)
        if sampling is None or sampling.max_tokens != most:
            if allowed is not None:
                tokens_alone = grammar_of_tokens(allowed, most, model.tokenizer)
                sampled = msgspec.structs.replace(sampled, grammar=tokens_alone)
            sampling = sampling_params(request, model.tokenizer, model.defaults, sampled, max_tokens=most)
        facts.append(
            RequestFacts(
                prompt_token_ids=prompt,
                # Without a seed, the same prompt twice is two samples; a seed is each prompt's.
                sampling=sampling if request.seed is not None else of_choice(sampling, at * asked.choices),
                priority=caller.priority(request.priority),
                cache_salt=caller.cache_salt(request.cache_salt),
                lora=model.adapter_of(request.model),
                # otherwise there is no single answer that the next turn continues
                job_id=caller.job_id if is_alone else None,
                is_last_step=caller.is_last_step,
                when_idle=caller.when_idle,
                skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache),
            )
        )
    return facts


def _plan(
    request: SamplingFields, model: ServedModel, caller: Caller, asked: _Asked, facts: list[RequestFacts]
) -> GenerationPlan:
    specs = [
        SequenceSpec(
            label=caller.label,
            facts=msgspec.structs.replace(one, sampling=of_choice(one.sampling, index)) if index else one,
            deadline=caller.deadline,
            first_by=caller.first_by,
            session=caller.session,
            trace=caller.trace,
            arrived=caller.arrived,
        )
        for one in facts
        for index in range(asked.choices)
    ]
    return GenerationPlan(
        specs=specs,
        prompt_texts=asked.texts,
        choices_per_prompt=asked.choices,
        keep=asked.keep,
        stops=stop_strings(request),
        show_logprobs=asked.show_logprobs,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        prompt_logprobs=request.prompt_logprobs,
        return_token_ids=bool(request.return_token_ids),
        chat=asked.chat,
        include_usage=model.config.include_usage,
        only_echo=asked.max_tokens == 0,
    )


def _choices_of(request: CompletionRequest) -> tuple[int, int]:
    """Returns how many choices are shown, and how many are generated."""
    if request.suffix:
        raise InvalidRequest("suffix: this model does not fill in the middle; leave it out", "suffix")
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise InvalidRequest(f"best_of: must be at least n ({n}), not {best_of}", "best_of")
    if best_of > n and request.stream:
        raise InvalidRequest("best_of: all of them must be complete to compare them, so not with stream", "best_of")
    return n, best_of


def _completion_tokens(request: CompletionRequest) -> int:
    asked = _asked_tokens(request)
    max_tokens = DEFAULT_COMPLETION_TOKENS if asked is None else asked
    if max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens: must be at least 1, unless echo is set", "max_tokens")
    return max_tokens


def _most_tokens(request: SamplingFields, model: ServedModel, prompt_tokens: int, asked: int | None) -> int:
    context = model.max_model_len
    _check_context(request, prompt_tokens, asked, context)
    if asked is not None:
        # A node always generates a token. With max_tokens=0 the client wants the prompt's log-probabilities.
        return max(1, asked)
    # Without a node the context length is unknown, and the dispatcher will answer that there is no node.
    room = context - prompt_tokens if context is not None else DEFAULT_COMPLETION_TOKENS
    return max(1, min(room, model.defaults.max_new_tokens or room))


def _check_context(request: SamplingFields, prompt_tokens: int, max_tokens: int | None, context: int | None) -> None:
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
        raise InvalidRequest("max_tokens: differs from max_completion_tokens, its newer name; set one", "max_tokens")
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
