"""Text of clients that looks like a special token, made ordinary text.

A tokenizer finds its special tokens wherever they stand in a prompt: a user's message could close its own turn and open the system's.
So within messages their text gets an invisible character that joins words (U+2060) after its first. The model reads it as the text
that it is, and every other text is left as it came, with the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.router.text.tokenizer import Tokenizer

# The second one for a tokenizer that drops the first.
_JOINERS = ("\u2060", " ")


class SpecialTextGuard:
    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = sorted(tokenizer.special_texts, key=len, reverse=True)
        # One of a single character has no inside.
        self._pattern = re.compile(
            "|".join(map(re.escape, (text for text in texts if len(text) > 1))) or r"(?!)"
        )
        self._normalize = tokenizer.normalize_for_special
        self._joiner = next(
            (
                joiner
                for joiner in _JOINERS
                if not _finds_special(tokenizer, self._broken("\n".join(texts), joiner))
            ),
            _JOINERS[-1],
        )

    def plain(self, text: str) -> str:
        if self._normalize is not None and self._pattern.search(normal := self._normalize(text)):
            text = normal  # what the tokenizer would have read there
        return self._broken(text, self._joiner) if self._pattern.search(text) else text

    def _broken(self, text: str, joiner: str) -> str:
        return self._pattern.sub(lambda found: found[0][0] + joiner + found[0][1:], text)

    def plain_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """As a chat template gets it. An assistant's is what a model wrote, and may have its special tokens."""
        return (
            message
            if message["role"] == "assistant"
            else {k: self.plain_value(v) for k, v in message.items()}
        )

    def plain_value(self, value: Any) -> Any:
        """Also within lists and mappings, their keys included."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.plain_value(k): self.plain_value(v) for k, v in value.items()}
        return [self.plain_value(one) for one in value] if isinstance(value, list) else value


def _finds_special(tokenizer: Tokenizer, text: str) -> bool:
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode(text, special=False))
