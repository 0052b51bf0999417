"""Compiled grammars for one model's vocabulary. Only this file uses the library that compiles them."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from tandem.base.errors import ConfigurationError, InvalidRequest
from tandem.base.own_thread import in_deep_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_KEPT = 256
# What one grammar may cost in a step, which all requests share: a grammar that needs more fails its request and delays no other.
# The costliest allowed grammar takes tens of milliseconds once; common schemas take a fraction of a millisecond.
_LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 20_000, "step_max_items": 5_000}
# The limits above count items, and not how often an item meets the others: with an ambiguous grammar that grows with the answer's
# length, up to seconds for a token. So the processor's time counts, too: common schemas take less than SHARE_S for a token, and a grammar
# that has taken MOST_BEYOND_S more than that in all fails its request.
SHARE_S, MOST_BEYOND_S = 0.005, 0.25
_WORD = 32
# Plain words for the library's names of errors.
_PLAIN = {"NoExtensionBias": "no text can follow it, such as one that refers to itself without an end"}

BitMask = npt.NDArray[np.uint32]
"""A bit for each token of the vocabulary, the lowest first."""


@functools.cache
def _library() -> Any:
    """Imports the library with the first grammar, so that an engine without grammars does not need it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigurationError(f"grammars need the package llguidance, which does not load here: {error}") from error


class GrammarPosition:
    """The position of one text in its grammar. It can go forward and back."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, cpu_time: Callable[[], float]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size  # the tokenizer's
        self._cpu_time = cpu_time
        self._beyond_s = 0.0
        self.num_tokens = 0
        self.num_certain = 0  # how many of them are no drafts
        # The place in the answer and the first token of the newest forced draft, how many in a row were not chosen, and how often
        # finding one was slow.
        self.expected: tuple[int, int] | None = None
        self.in_vain = 0
        self.slow = 0

    def follow(self, token_ids: list[int]) -> int:
        """Advances over these tokens up to the first one that the grammar forbids; returns how many it allowed. Raises an
        InvalidRequest for a grammar that costs too much to follow."""
        # A token in the vocabulary's padding would put the matcher into an error state for good.
        known = list(itertools.takewhile(lambda token: token < self._vocab_size, token_ids))
        began = self._cpu_time()
        taken: int = self._matcher.try_consume_tokens(known)
        self._spend(began, len(known))
        self.num_tokens += taken
        if taken < len(known) and self._matcher.is_error():
            raise InvalidRequest(f"the answer's grammar failed: {self._why()}")
        return taken

    def go_back(self, num_tokens: int) -> None:
        """Goes back to the position after the first `num_tokens` tokens."""
        if num_tokens < self.num_tokens and not self._matcher.rollback(self.num_tokens - num_tokens):
            raise InvalidRequest(f"the answer's grammar failed: {self._why()}")
        self.num_tokens = num_tokens

    def fill(self, mask: BitMask) -> None:
        """Fills the mask of tokens that may come next. When the grammar is complete, these are the tokens that end the answer.
        Raises an InvalidRequest for a grammar that costs too much to follow."""
        if self._beyond_s > MOST_BEYOND_S:
            raise InvalidRequest(
                "the answer's grammar failed: it has taken too much time, because a text has too many readings"
            )
        began = self._cpu_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._spend(began, 1)
        if self._matcher.is_error():
            raise InvalidRequest(f"the answer's grammar failed: {self._why()}")
        if not mask.any():
            raise InvalidRequest("the answer's grammar leaves nothing that could come next")

    def forced(self) -> list[int]:
        """Returns the tokens of the text that must come next, as the tokenizer cuts it; none if the grammar leaves a choice. The
        model may cut the text in another way, as the mask allows. It computes all of that text, however long."""
        # In a copy, because what is too costly here must not fail the answer.
        found: list[int] = self._matcher.deep_copy().compute_ff_tokens()
        return list(itertools.takewhile(lambda token: token < self._vocab_size, found))

    def _spend(self, began: float, num_tokens: int) -> None:
        self._beyond_s += max(0.0, self._cpu_time() - began - num_tokens * SHARE_S)

    def _why(self) -> str:
        lines = str(self._matcher.get_error()).strip().splitlines()
        if not lines:
            return "it is in no state to go on"
        return _PLAIN.get(lines[0], lines[0][:300])


class _Compiled:
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher


class TokenizerGrammars:
    """Compiles and keeps the grammars used last. Several threads use it. `prepare` may take long; a prepared grammar is available at
    once until newer ones replace it, and for as long as anyone has what `prepared` returned."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        limits: LLParserLimits | None = None,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu_time`: how long the calling thread has computed."""
        self._tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._limits = limits
        self._cpu_time = cpu_time
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        # Those that newer ones have replaced, too.
        self._in_use: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()
        self._lock = threading.Lock()

    def empty_masks(self, count: int) -> BitMask:
        """Masks that are wide enough for the model's vocabulary and for the tokenizer's; either may be the larger one."""
        known = max(self.vocab_size, self._loaded().vocab_size)
        return np.zeros((count, -(-known // _WORD)), np.uint32)

    def prepared(self, grammar: str) -> object | None:
        """The compiled grammar, which is kept for as long as anyone has it; None if it must be compiled first."""
        with self._lock:
            return self._in_use.get(grammar)

    def prepare(self, grammar: str) -> None:
        """Compiles the grammar unless it is kept. Raises an InvalidRequest for a text that is not a grammar."""
        self._find(grammar)

    def begin(self, grammar: str) -> GrammarPosition:
        return GrammarPosition(self._find(grammar).matcher.deep_copy(), self._loaded().vocab_size, self._cpu_time)

    def _find(self, grammar: str) -> _Compiled:
        with self._lock:
            found = self._in_use.get(grammar)
        if found is None:
            found = _Compiled(in_deep_stack(lambda: self._compile(grammar)))
        with self._lock:
            self._compiled[grammar] = self._in_use[grammar] = found
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        library = _library()
        limits = self._limits or library.LLParserLimits(**_LIMITS)
        matcher: LLMatcher = library.LLMatcher(
            self._loaded(), library.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
        )
        # The first mask computes what the library computes lazily. All copies share it then.
        GrammarPosition(matcher, 0, self._cpu_time).fill(self.empty_masks(1)[0])
        return matcher

    def _loaded(self) -> LLTokenizer:
        """The library's tokenizer, made with the first grammar because that takes a quarter of a second or more."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = _library().LLTokenizer(self._tokenizer_json(), eos_token=self._eos or None)
                except ValueError as error:
                    raise ConfigurationError(f"grammars cannot follow this tokenizer: {error}") from error
            return self._tokenizer
