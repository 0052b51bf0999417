"""What the servers are asked: a built-in set of requests, or those of a file."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.describe import counted

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_ALTERNATIVES = 5  # tokens at each place whose log-probabilities are compared besides the answer's own
# Tokens of the built-in prompts: less than a block, whole blocks and a token more, and several steps' chunks.
_LENGTHS = (1, 5, 16, 17, 63, 200, 500, 1000)
_SAMPLED: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    {"temperature": 1.2, "n": 2},
)
_WITH_PROMPT = 100  # the log-probabilities of shorter prompts are compared, too: those of long ones are many megabytes
# Words, numbers, signs and line ends, so that tokens of many kinds lie beside each other.
_WORDS = re.findall(
    "\\S+|\n\n",
    "river stone seven letter winter because under market glass the of and it has never a small engine reads what other people "
    "wrote about numbers 12 1,048,576 x=3; e.g. über naïve ( ) -- \n\n done? yes!",
)


class Question(msgspec.Struct, frozen=True):
    name: str  # for the one who reads the result
    path: str
    body: dict[str, Any]


def built_in(context: int | None, max_tokens: int) -> list[Question]:
    """Prompts of many lengths that fit into the context, each once greedy and once sampled."""
    words = random.Random(0)
    text = " ".join(words.choice(_WORDS) for _ in range(2 * _LENGTHS[-1]))
    room = (context or _LENGTHS[-1] + max_tokens) - max_tokens
    if room < 1:
        raise ConfigurationError(
            f"--max-tokens is {max_tokens}, and the servers' context has {context} tokens: ask for fewer"
        )
    lengths = [length for length in _LENGTHS if length <= room]
    found: list[Question] = []
    for seed, (length, sampled) in enumerate(zip(lengths, itertools.cycle(_SAMPLED), strict=False)):
        for fields in ({"temperature": 0.0}, {**sampled, "seed": seed}):
            said = ", ".join(f"{name} {value}" for name, value in fields.items())
            body = {
                "prompt": text,
                "truncate_prompt_tokens": length,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                **fields,
            }
            if length <= _WITH_PROMPT and not fields["temperature"]:
                body["prompt_logprobs"] = 1
            found.append(_question(f"a prompt of {counted(length, 'token')}, {said}", body, seed))
    return found


def of_file(file: Path) -> list[Question]:
    """The requests of a file, one JSON object a line, each a body of /v1/completions or, with `messages`, of /v1/chat/completions."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    found = list(_of_lines(file, lines))
    if not found:
        raise ConfigurationError(f"{file} has no request: write one JSON object a line, with a prompt or messages")
    return found


def _of_lines(file: Path, lines: list[bytes]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{file}:{number} is no JSON ({error}): write one object a line") from error
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise ConfigurationError(
                f'{file}:{number} must be an object with either a prompt or messages, such as {{"prompt": "Hello", "max_tokens": 20}}'
            )
        yield _question(f"line {number} of {file.name}", body, number)


def _question(name: str, body: dict[str, Any], seed: int) -> Question:
    """Asks for everything that can be compared. A request without a seed gets one: the servers would draw different ones."""
    is_chat = "messages" in body
    wanted: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": _ALTERNATIVES} if is_chat else {"logprobs": _ALTERNATIVES}
    )
    whole = {**wanted, **body, "stream": False, "return_token_ids": True}
    if whole.get("seed") is None:
        whole["seed"] = seed
    whole.pop("stream_options", None)
    return Question(name, _CHAT if is_chat else _COMPLETIONS, whole)
