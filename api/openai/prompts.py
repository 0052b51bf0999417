"""What a router serves (its model's names, tokenizer and template), and how requests' prompts are made from
it: one or several texts or lists of token ids for completions, and the prompt of a chat's messages.

The request type of POST /v1/completions is here, too.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import msgspec

from tandem.api import wings
from tandem.api.lark import JsonObject
from tandem.api.openai.chat_request import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImagePart,
    Tool,
    ToolCall,
    thinks,
)
from tandem.api.openai.completion_request import Prompts
from tandem.api.openai.fields import SamplingFields
from tandem.api.openai.sampling import defaults_of
from tandem.api.settings import ApiSettings
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import ContextLengthExceeded, InvalidRequest, RequestError, UnknownModel
from tandem.base.shares import OneAtATime
from tandem.wire.adapters import identity_of
from tandem.wire.pooling import VectorModel

# Rendering more takes milliseconds, so a thread does it.
INLINE_ITEMS = 50
INLINE_CHAT_CHARACTERS = 16 << 10
# Tokenizing more takes about a tenth of a second.
LONG_TEXT = 256 << 10
long_texts = OneAtATime()

RequestT = TypeVar("RequestT", bound=SamplingFields)


class NotHere(RequestError):
    """What a path names by its id, which names no model, is not here. Another deployment may have it."""

    http_status = 404


class ModelElsewhere(UnknownModel):
    """A model of another deployment whose router is known here."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model[:200]!r} is another deployment's, which cannot be asked this here"
        )
        self.model = model


class ServedModel:
    """What this router serves, and what the checks need to know about it."""

    def __init__(
        self,
        config: ApiSettings,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: Callable[[], int | None],
        created: int,
        vectors: Callable[[], VectorModel | None] = lambda: None,
        adapters: Callable[[], Mapping[str, str]] = dict,
        images: wings.ImageReader | None = None,
    ) -> None:
        """`images`: None when the model reads no images."""
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.guard = SpecialTextGuard(tokenizer)
        self.created = created
        self.defaults = defaults_of(config)
        self.format = wings.format_of(config, template)
        self.names = (config.model_name, *config.model_aliases)
        self._max_model_len = max_model_len
        self._vectors = vectors
        self._adapters = adapters
        self.images = images

    @property
    def max_model_len(self) -> int | None:
        """The shortest context length of the nodes, because any of them may get the request. None while there
        is no node."""
        return self._max_model_len()

    @property
    def vectors(self) -> VectorModel | None:
        """How the model makes vectors. None when it makes none, or while there is no node."""
        return self._vectors()

    def name_of(self, name: str | None) -> str:
        """The model's name in an answer: the one that the request used, or the first."""
        return self.names[0] if name is None else name

    @property
    def adapters(self) -> Mapping[str, str]:
        """The digests, by name, of the LoRA adapters that requests may use."""
        return self._adapters()

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            if name in self.config.other_models:
                raise ModelElsewhere(name)
            known = ", ".join((*self.names, *sorted(self.adapters), *self.config.other_models))
            raise UnknownModel(f"the model {name[:200]!r} does not exist; this server has {known[:2000]}")

    def named_by(self, request: RequestT) -> RequestT:
        """Checks the names of model and adapter. Returns the request with the adapter of `lora_path` as its model."""
        self.check_name(request.model)
        adapter = request.lora_path
        if adapter is None or adapter == request.model:
            return request
        if request.model is not None and request.model not in self.names:
            raise InvalidRequest(
                f"lora_path: contradicts model, the adapter {request.model!r}; set one", "lora_path"
            )
        if adapter not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise InvalidRequest(
                f"lora_path: {adapter[:200]!r} is no adapter of this server; it has {known[:2000]}",
                "lora_path",
            )
        return msgspec.structs.replace(request, model=adapter)

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the identity of the adapter that a request names as its model; None for the model
        itself."""
        if name is None or name in self.names:
            return None
        digest = self.adapters.get(name)
        if digest is None:  # it was unloaded since the name was checked
            raise UnknownModel(f"the model {name[:200]!r} does not exist any more")
        return identity_of(name, digest)


class PromptTooLong(ContextLengthExceeded):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def prompts_of(given: Prompts | None, param: str) -> list[str | list[int]]:
    """Returns one entry per prompt: text or token ids. Raises InvalidRequest for a mixture."""
    if given is None:
        raise InvalidRequest(f"{param}: is missing", param)
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))  # a list may have millions of token ids
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", given)
    if kinds == {int}:
        return [cast("list[int]", given)]
    raise InvalidRequest(
        f"{param}: must be text, or token ids, or a list of one of them, not a mixture", param
    )


async def prompt_ids(
    prompt: str | list[int],
    param: str,
    tokenizer: Tokenizer,
    context: int | None,
    *,
    special: bool,
    owner: CacheOwner,
) -> list[int]:
    if isinstance(prompt, str):
        ids = await encoded(prompt, param, tokenizer, context, special=special, owner=owner)
        if not ids:
            raise InvalidRequest(f"{param}: must not be empty", param)
        return ids
    check_count(prompt, param, context)
    unknown = tokenizer.first_unknown(prompt)
    if unknown is not None:
        size = tokenizer.vocab_size
        raise InvalidRequest(f"{param}: token id {unknown} is outside the vocabulary of {size} tokens", param)
    return prompt


def check_count(token_ids: Sequence[int], param: str, context: int | None) -> None:
    """Refuses more token ids than the context holds before anything looks at them."""
    if context is not None and len(token_ids) > context:
        raise PromptTooLong(
            f"{param}: has {len(token_ids)} tokens, and the model's context is {context}; send at most so many",
            param,
        )


async def encoded(
    text: str, param: str, tokenizer: Tokenizer, context: int | None, *, special: bool, owner: CacheOwner
) -> list[int]:
    """Tokenizes a text. A text that certainly does not fit is refused without tokenizing it. `context`: None
    when any length is allowed."""
    if context is not None and len(text) > (most := tokenizer.most_characters(context)):
        raise _too_many_characters(param, f"{len(text)} characters are", context, most)
    if len(text) > LONG_TEXT:
        async with long_texts.turn(owner.tenant):
            return await tokenizer.encode_async(text, special=special, owner=owner)
    return await tokenizer.encode_async(text, special=special, owner=owner)


def _too_many_characters(param: str, what: str, context: int, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"{param}: {what} more than the model's context of {context} tokens can hold; send at most {most}",
        param,
    )


def _text_lengths(*values: Any) -> Iterator[int]:
    """Yields the lengths of all texts within the values of a request, however deep, and 1 for each other value.
    Images' addresses are no text of the prompt."""
    open_values: list[Iterator[Any]] = [iter(values)]
    while open_values:
        for value in open_values[-1]:
            if isinstance(value, str):
                yield len(value)
            elif isinstance(value, Mapping):
                open_values.append(chain.from_iterable(value.items()))
                break
            elif isinstance(value, list | tuple):
                open_values.append(iter(value))
                break
            elif isinstance(value, msgspec.Struct):
                fields = (name for name in value.__struct_fields__ if name != "image_url")
                open_values.append(map(functools.partial(getattr, value), fields))
                break
            elif value is not None:
                yield 1
        else:
            open_values.pop()


def _is_short(*values: Any) -> bool:
    """Whether the values are few and their texts short. Takes no longer for longer ones."""
    left = INLINE_CHAT_CHARACTERS
    for length in _text_lengths(*values):
        left -= length + 8  # a value costs time, too
        if left < 0:
            return False
    return True


def _check_characters(tokenizer: Tokenizer, context: int, *values: Any) -> None:
    """Refuses a chat whose texts certainly do not fit. Stops counting there."""
    most = left = tokenizer.most_characters(context)
    for length in _text_lengths(*values):
        left -= length
        if left < 0:
            raise _too_many_characters(
                "messages", "the characters of the chat, its tools and documents are", context, most
            )


def truncated(
    token_ids: list[int], keep: int | None, max_tokens: int | None, context: int | None
) -> list[int]:
    """Returns at most the last `keep` tokens (`truncate_prompt_tokens`); with -1, as many as leave room for
    an answer."""
    if keep is None or (keep == -1 and context is None):
        return token_ids
    if keep == -1 and context is not None:
        keep = context - max(1, max_tokens or 1)
    if keep < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens: must be at least 1, or -1 with max_tokens that leave room for a prompt",
            "truncate_prompt_tokens",
        )
    return token_ids[-keep:]


class ChatPrompt(msgspec.Struct, frozen=True):
    text: str
    images: wings.PromptImages | None = None


async def with_images(text: str, messages: Sequence[ChatMessage], model: ServedModel) -> ChatPrompt:
    """Reads the messages' images and expands their placeholders in the rendered prompt."""
    parts = image_parts(messages)
    if not parts or model.images is None:
        return ChatPrompt(text)
    images = await model.images.read(parts)
    return ChatPrompt(images.expanded(text), images)


def check_images(messages: Sequence[ChatMessage], model: ServedModel) -> None:
    """Raises InvalidRequest for an image when the model reads none. Must be called before rendering."""
    if model.images is None and (parts := image_parts(messages)):
        where = parts[0].where
        raise InvalidRequest(
            f"{where}: must be a part of type 'text' with a text; this model reads no 'image_url'", where
        )


async def chat_prompt(request: ChatRequest, model: ServedModel, context: int | None) -> ChatPrompt:
    """Renders a chat with the model's template. Raises InvalidRequest. `context`: None when any length is
    allowed."""
    check_images(request.messages, model)
    if model.template is None:
        raise InvalidRequest("messages: this model has no chat template; use /v1/completions", "messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: contradicts add_generation_prompt", "continue_final_message"
        )
    text = await render_chat(
        model.template,
        model.guard,
        request.messages,
        tools_to_call(request),
        tokenizer=model.tokenizer,
        context=context,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        documents=request.documents,
        extra=template_variables(request),
    )
    return await with_images(text, request.messages, model)


def tools_to_call(request: ChatRequest) -> list[Tool] | None:
    """Returns the tools that the model is told of, or None."""
    return request.tools if request.tools and request.tool_choice != "none" else None


async def render_chat(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    tokenizer: Tokenizer,
    context: int | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None,
) -> str:
    """Renders a chat, a long one in a thread, so that other streams go on. A chat whose texts certainly do not fit
    into the context is refused before anything looks into them. `context`: None when any length is allowed."""

    def render() -> str:
        if context is not None:
            _check_characters(tokenizer, context, messages, tools, documents, extra)
        return _render(
            template,
            guard,
            messages,
            tools or (),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=guard.plain_value(documents),
            extra=extra,
        )

    if len(messages) + len(tools or ()) <= INLINE_ITEMS and _is_short(messages, tools, documents, extra):
        return render()
    return await asyncio.to_thread(render)


def _render(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    **options: Any,
) -> str:
    plain: Sequence[Mapping[str, Any]] = [guard.plain_message(one) for one in messages_for_template(messages)]
    offered = [tool_for_template(tool) for tool in tools]
    if offered and not template.mentions_tools:
        plain, offered = wings.told_in_words(plain, offered, has_system=template.takes_system), []
    if not template.takes_text:
        plain = [_in_parts(message) for message in plain]
    return template.render(plain, tools=offered or None, **options)


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def template_variables(request: ChatRequest) -> JsonObject:
    """Returns the request's own template variables, and what it says about reasoning under the names that
    models' templates read."""
    variables: JsonObject = {}
    wanted = thinks(request)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if wanted is None and request.reasoning_effort == "none":
            wanted = False
    if wanted is not None:
        variables["enable_thinking"] = variables["thinking"] = wanted
    return variables | (request.chat_template_kwargs or {})


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns plain dictionaries as chat templates expect them. A content is text, or a list of parts if it
    has images."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def image_parts(messages: Sequence[ChatMessage]) -> list[ImagePart]:
    """Returns the messages' images in the order in which a template writes them."""
    return [
        ImagePart(part.url, f"messages[{index}].content[{at}]")
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if part.type == "image_url" and part.url is not None
    ]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    content = _content(message, where)
    if content is None and not message.tool_calls:
        raise InvalidRequest(
            f"{where}.content: must be text, unless an assistant's message has tool_calls", where
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only an assistant's message has them", where)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{where}.tool_call_id: a tool's message must say which call it answers", where)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = content if content is not None else ""
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{where}.tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _content(message: ChatMessage, where: str) -> str | list[dict[str, Any]] | None:
    content = message.content
    if content is None or isinstance(content, str):
        return content
    if not any(part.type == "image_url" for part in content):
        return _text(content, where)
    if message.role != "user":
        raise InvalidRequest(f"{where}.content: only a user's message has images", f"{where}.content")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if part.type != "image_url":
            parts.append({"type": "text", "text": _text([part], where, index)})
        elif part.url is None:
            raise InvalidRequest(
                f"{where}.content[{index}].image_url: must be an object with a url",
                f"{where}.content[{index}]",
            )
        else:
            parts.append({"type": "image"})
    return parts


def _text(content: Sequence[ContentPart], where: str, first: int = 0) -> str:
    pieces: list[str] = []
    for index, part in enumerate(content, first):
        text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
        if text is None:
            raise InvalidRequest(
                f"{where}.content[{index}]: must be a part of type 'text' with a text; this model reads no {part.type!r}",
                f"{where}.content[{index}]",
            )
        pieces.append(text)
    return "\n".join(pieces)


def _arguments(call: ToolCall, where: str) -> Any:
    """Returns a call's arguments as an object, because templates write it themselves. OpenAI's clients send
    JSON text."""
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments: must be JSON: {error}", where) from error


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Returns the tool as the client wrote it, without fields that it left out."""
    function = {
        name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None
    }
    return {"type": tool.type, "function": function}
