"""Writes and reads gpt-oss's format with OpenAI's own library: `python harmony_library.py` in the clients' environment.

The library downloads its vocabulary unless a folder has it; LiteLLM's package contains the same file, under the name that tiktoken
expects. The program reads answers from standard input, as lists of [channel, function or null, text], and prints how the library
writes each one, and what it reads back from that.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"  # o200k_base


def written(harmony: Any, encoding: Any, answer: list[tuple[str, str | None, str]]) -> list[int]:
    """The tokens of an answer, after the prompt's `<|start|>assistant`."""
    tokens: list[int] = []
    for channel, function, text in answer:
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
        if function is not None:
            message = message.with_recipient(f"functions.{function}").with_content_type("<|constrain|>json")
        tokens += encoding.render(message)
    head = encoding.encode("<|start|>assistant", allowed_special="all")
    assert tokens[: len(head)] == head
    return tokens[len(head) :]


def read(harmony: Any, encoding: Any, tokens: list[int]) -> list[dict[str, Any]]:
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token in tokens:
        parser.process(token)
    parser.process_eos()
    return [message.to_dict() for message in parser.messages]


def main() -> None:
    package = find_spec("litellm")
    assert package is not None
    assert package.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(package.origin).parent / VOCABULARY, Path(folder) / "o200k_base.tiktoken")
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        import openai_harmony as harmony

        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    found = []
    for answer in json.load(sys.stdin):
        if isinstance(answer, str):
            tokens = encoding.encode(answer, allowed_special="all")
        else:
            tokens = written(harmony, encoding, answer)
        found.append({"text": encoding.decode_utf8(tokens), "messages": read(harmony, encoding, tokens)})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
