"""Grammars: answers that follow one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.checkpoint import eos_tokens
from tandem.engine.model.source import tokenizer_json
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.engine.structured.masks import GrammarMasks

if TYPE_CHECKING:
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.loaded import ForwardShape, LoadedModel
    from tandem.engine.model.parts import RunnerPart


def capability(loading: ModelLoad) -> Capability | None:
    return StructuredOutput(loading)


class StructuredOutput(Capability):
    masks: GrammarMasks | None = None

    def __init__(self, loading: ModelLoad) -> None:
        self._source, self._eos = loading.source, eos_tokens(loading.source, loading.config)

    def planned(self, loaded: LoadedModel, plan: CachePlan) -> None:
        text = functools.partial(tokenizer_json, self._source)
        self.masks = GrammarMasks(TokenizerGrammars(text, loaded.vocab_size, self._eos))

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        return (self.masks,) if self.masks is not None else ()
