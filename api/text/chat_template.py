"""A model's chat template: the Jinja program in its folder that turns messages into a prompt.

The template is the operator's and not the client's, but it runs sandboxed, because it handles clients' data.
Its environment is the one that templates are written for: a test renders many families' templates here and
with transformers, and compares the results.

A tokenizer finds special tokens anywhere in a prompt, so a user's message could close its own turn and open
the system's. To prevent that, the text of a special token within a message gets an invisible word joiner
(U+2060) after its first character. The model reads it as ordinary text. All other text keeps its tokens.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tandem.api.text.segment_cache import WINDOW_CHARACTERS, matches
from tandem.api.text.tokenizer import Tokenizer, read_json
from tandem.base.errors import ConfigurationError, InvalidRequest

# The second is for tokenizers that drop the first.
_JOINERS = ("\u2060", " ")


class SpecialTextGuard:
    """Keeps clients' text from being read as special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = sorted(tokenizer.special_texts, key=len, reverse=True)
        # A special token of one character cannot be split.
        divisible = [text for text in texts if len(text) > 1]
        self._pattern = re.compile("|".join(map(re.escape, divisible)) or r"(?!)")
        self._longest = len(divisible[0]) if divisible else 1
        self._normalize = tokenizer.normalize_for_special
        self._joiner = next(
            (joiner for joiner in _JOINERS if not _finds_special(tokenizer, self._broken("\n".join(texts), joiner))),
            _JOINERS[-1],
        )

    def plain(self, text: str) -> str:
        if self._normalize is not None and any(matches(self._pattern, normal := self._normalize(text), self._longest)):
            text = normal  # what the tokenizer would read after normalizing
        return self._broken(text, self._joiner)

    def _broken(self, text: str, joiner: str) -> str:
        if len(text) <= WINDOW_CHARACTERS and self._pattern.search(text) is None:
            return text  # nearly every text
        broken = io.StringIO()
        at = 0
        for found in matches(self._pattern, text, self._longest):
            broken.write(text[at : found.start() + 1])
            broken.write(joiner)
            at = found.start() + 1
        if not at:
            return text
        broken.write(text[at:])
        return broken.getvalue()

    def plain_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the message for the template. An assistant's message stays unchanged: a model wrote it, and
        it may have special tokens."""
        return message if message["role"] == "assistant" else {k: self.plain_value(v) for k, v in message.items()}

    def plain_value(self, value: Any) -> Any:
        """Makes all texts of a value plain, within lists and mappings, too, and in their keys."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, (dict, Mapping)):  # a dict is found at once
            return {self.plain_value(k): self.plain_value(v) for k, v in value.items()}
        return [self.plain_value(one) for one in value] if isinstance(value, list) else value


def _finds_special(tokenizer: Tokenizer, text: str) -> bool:
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode(text, special=False))


# The names that clients and templates use for an earlier turn's reasoning; the first is the usual one.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. Here the block is just its content.

    The block has its own scope: a variable that is set in it is not set after it.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates, without the type's other attributes."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["dict"] = _Dict()
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """Renders messages. A model has one template, or several by name, of which `tool_use` serves requests
    with tools."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the chat template does not compile: {error}") from error
        self._globals = dict(environment.globals)
        self._variables = dict(variables)
        self._sources = tuple(sources.values())
        self.mentions_tools = self.mentions("tools")

    @classmethod
    def from_folder(cls, folder: str, own: str | None = None) -> ChatTemplate | None:
        """Reads a model's template. Returns None when it has none and only completes text.

        `own`: the operator's template, as a file or as text, used instead.
        """
        path = Path(folder)
        settings = read_json(path / "tokenizer_config.json")
        if own is not None:
            return cls({"default": template_source(own)}, _special_tokens(path, settings))
        sources: dict[str, str] = {}
        declared = settings.get("chat_template")
        if isinstance(declared, str):
            sources["default"] = declared
        elif isinstance(declared, list):
            try:
                sources.update({str(entry["name"]): str(entry["template"]) for entry in declared})
            except (TypeError, LookupError) as error:
                raise ConfigurationError(
                    f"{path / 'tokenizer_config.json'}: chat_template must be text, or a list of names and templates"
                ) from error
        if (file := path / "chat_template.jinja").exists():
            sources["default"] = _read_text(file)
        for named in sorted((path / "additional_chat_templates").glob("*.jinja")):
            sources[named.stem] = _read_text(named)
        if not sources:
            return None
        return cls(sources, _special_tokens(path, settings))

    def mentions(self, text: str) -> bool:
        return any(text in source for source in self._sources)

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether it renders a system message. Some templates refuse one, and some leave it out."""
        words = "Take care."
        messages: list[Mapping[str, Any]] = [
            {"role": "system", "content": words},
            {"role": "user", "content": "Hello."},
        ]
        if not self.takes_text:
            messages = [in_parts(message) for message in messages]
        try:
            return words in self.render(messages)
        except InvalidRequest:
            return False

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether it renders a message whose content is text. Templates of models that read images may look
        for a list of parts, and leave text out."""
        words = "Take care."
        try:
            as_text = self.render([{"role": "user", "content": words}])
            as_parts = self.render([{"role": "user", "content": [{"type": "text", "text": words}]}])
        except InvalidRequest:
            return True
        return words in as_text or words not in as_parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._templates.get("tool_use") if tools else None
        if template is None:
            template = self._templates.get("default") or next(iter(self._templates.values()))
        messages = [_with_reasoning(message) for message in messages]
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        try:
            # Like `template.render`, which would also walk through and copy all globals.
            context = template.new_context(
                {
                    **self._globals,
                    **(extra or {}),
                    **self._variables,  # last, so that a client cannot replace the model's special tokens
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                },
                shared=True,
            )
            text = "".join(template.root_render_func(context))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages: the model's chat template refuses them: {error}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"messages: the model's chat template cannot render them ({type(error).__name__}: {error})", "messages"
            ) from error
        return _cut_at(text, mark) if mark else text


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message as templates read it that know parts alone."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def template_source(own: str) -> str:
    """Returns the operator's template: the given text if it is a template, otherwise the text of that
    file."""
    if "{{" in own or "{%" in own:
        return own
    file = Path(own)
    if not file.is_file():
        raise ConfigurationError(
            f"router.chat_template: {own!r} is neither a file nor a template, which would have {{{{ or {{% in it"
        )
    return _read_text(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Returns the message with a random mark at the end of its text. The text alone would not do: the
    template may write the same text after it."""
    content = message.get("content") or ""
    parts: list[Mapping[str, Any]] = content if isinstance(content, list) else [{"text": content}]
    text = str(parts[-1].get("text") or "")
    if not text.strip():
        raise InvalidRequest(
            "messages: with continue_final_message the last message must have text to continue", "messages"
        )
    text += mark + " "
    if isinstance(content, list):
        return {**message, "content": [*parts[:-1], {**parts[-1], "text": text}]}
    return {**message, "content": text}


def _cut_at(text: str, mark: str) -> str:
    """Cuts the prompt at the mark, so that the model continues the last message."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "messages: continue_final_message does not work with this model: its chat template leaves out the last message",
            "messages",
        )
    # A template that trimmed the mark's space would also have trimmed the text's.
    return before if after.startswith(" ") else before.rstrip()


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copies a message's reasoning to each name that templates read."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    merged = {**read_json(path / "special_tokens_map.json"), **settings}
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
