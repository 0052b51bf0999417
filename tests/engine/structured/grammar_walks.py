"""A model with random logits, biased towards tokens that close a text. So any structure in its answers comes from their grammar."""

from __future__ import annotations

import functools

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.base.errors import TandemError
from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.sampling.sampler import Sampler
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.engine.structured.masks import GrammarMasks
from tandem.wire.sampling import SamplingParams

END = 1
PROMPT = [5, 6, 7]
ROOM = 512


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """A tokenizer with all bytes, and merges across the borders of a grammar's parts, such as `": "` and `"},`."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    corpus = ['{"name": "Bob", "tags": ["a", "b"], "x": {"y": 12.5, "z": null}}, true, false'] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    return made


def vocabulary() -> int:
    return int(backend().get_vocab_size(with_added_tokens=True)) + 3  # padded, as models' are


@functools.cache
def grammars() -> TokenizerGrammars:
    return TokenizerGrammars(backend().to_str, vocabulary(), frozenset({END}))


def encode(text: str) -> list[int]:
    ids: list[int] = backend().encode(text, add_special_tokens=False).ids
    return ids


def decode(token_ids: list[int]) -> str:
    text: str = backend().decode(token_ids)
    return text


def costly_after(text: str) -> str:
    """What follows `text` costs more than a grammar may. The other answer, yes, costs little."""
    rules = [f'r{i}: "a" "{i}" "c"' for i in range(6000)]
    return "\n".join([f'start: "yes" | "{text}" costly', f"costly: {' | '.join(f'r{i}' for i in range(6000))}", *rules])


@functools.cache
def leaning() -> torch.Tensor:
    lean = torch.zeros(vocabulary())
    for text in ('"', "}", "]", "0", "e", "l"):
        lean[encode(text)[0]] = 3.0
    lean[END] = 6.0
    return lean


def logits_at(seed: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + position)
    return torch.randn(vocabulary(), generator=generator) * 2 + leaning()


class Model:
    """One request in one sampler. `output`: the tokens that another node has sampled before."""

    def __init__(self, params: SamplingParams, seed: int = 0, output: list[int] | None = None) -> None:
        self.seed = seed
        self.requests = RequestRows(2, ROOM, 16, 1)
        self.table = SamplingTable(2)
        self.masks = GrammarMasks(grammars())
        self.sampler = Sampler(vocabulary(), frozenset({END}), torch.device("cpu"), self.masks)
        self.row = self.requests.add("r", PROMPT + (output or []), len(PROMPT), [[]])
        self.table.set(self.row, params)

    @property
    def output(self) -> list[int]:
        tokens = self.requests.tokens[self.row, len(PROMPT) : self.requests.num_tokens[self.row]]
        return [int(token) for token in tokens]

    @property
    def failure(self) -> TandemError | None:
        return self.sampler.failed.get(self.row)

    def sample(self, drafts: list[int] | None = None) -> list[int]:
        """Samples the next token; with drafts, also the token after each right draft."""
        drafts = drafts or []
        known = int(self.requests.num_tokens[self.row])
        self.requests.tokens[self.row, known : known + len(drafts)] = drafts
        positions = known + np.arange(len(drafts) + 1)
        logits = torch.stack([logits_at(self.seed, int(position)) for position in positions])
        rows = np.full(len(positions), self.row)
        chosen = self.sampler.sample(logits, rows, positions, self.requests, self.table).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
            accepted += 1
        self.requests.append_tokens(self.row, chosen[: accepted + 1])
        return chosen[: accepted + 1]

    def finish(self, limit: int = 400) -> str:
        """Samples until the answer ends, which must happen within `limit` tokens."""
        while not self.output or self.output[-1] != END:
            assert len(self.output) < limit, decode(self.output)
            self.sample()
            assert self.failure is None, self.failure
        return decode(self.output[:-1])
