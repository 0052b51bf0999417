"""The native library gives each token of a sequence the same logits, bit for bit, whatever else is in the step, however the sequence is cut
into chunks, and with any number of threads; so a request has the same tokens and log-probabilities whatever happens to it. docs/exact.md
promises it.

TANDEM_SAME_BITS says which seeds each case has: 100 for the first hundred, 100-200 for the next. With `-s` each case of the lives prints
what it compared.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.kernels.library import BlockRows, Weights
from tests.engine.model.driver import load
from tests.engine.model.lives import GGUF, PROMISED, Lives, alone, prompts_of, saved
from tests.engine.native.batches import Sequences
from tests.engine.native.test_native_model import Unit, windows
from tests.kernels.block_rows import block_rows
from tests.more import more

_FIRST, _, _END = os.environ.get("TANDEM_SAME_BITS", "1").rpartition("-")
SEEDS = range(int(_FIRST or 0), int(_END))
LENGTH, COUNT, VOCAB = 160, 3, 515

# So wide that products and attention are cut into several tiles, and with sizes that fill no tile.
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 392, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
BLOCKS = "llama-blocks"  # its matrices are in a GGUF file's blocks
INTEGERS = "llama-integers"  # in blocks of integers of 4 and 8 bits, of several sizes
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_WIDE, tie_word_embeddings=True),
    BLOCKS: lambda: transformers.LlamaConfig(**{**_WIDE, "intermediate_size": 416}, tie_word_embeddings=True),
    INTEGERS: lambda: CONFIGS[BLOCKS](),
    "qwen3": lambda: transformers.Qwen3Config(**_WIDE, head_dim=64),
    "mistral-window": lambda: transformers.MistralConfig(**_WIDE, head_dim=16, sliding_window=37),
    "qwen2-odd": lambda: transformers.Qwen2Config(
        **{**_WIDE, "hidden_size": 200, "num_attention_heads": 5, "num_key_value_heads": 1}
    ),
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(len(name))
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


def cache_for(forward: NativeLlamaForward, model: PreTrainedModel) -> Sequences:
    return Sequences(forward, model, windows(model.config), count=COUNT, length=LENGTH)


def in_company(
    forward: NativeLlamaForward, sequences: Sequences, texts: list[list[int]], rng: random.Random
) -> list[torch.Tensor]:
    """Reads all texts in random chunks, of which each step has some, in random order. Returns the logits of every token."""
    done = [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while unread := [number for number, text in enumerate(texts) if done[number] < len(text)]:
        step = rng.sample(unread, rng.randint(1, len(unread)))
        work = {}
        for number in step:
            size = 1 if rng.random() < 0.3 else rng.randint(1, rng.choice([3, 17, 64, LENGTH]))
            work[number] = texts[number][done[number] : done[number] + size]
        logits, start = forward(sequences.batch(work)), 0
        for number, chunk in work.items():
            found[number].append(logits[start : start + len(chunk)].clone())
            start += len(chunk)
            done[number] += len(chunk)
    return [torch.cat(pieces) for pieces in found]


def in_blocks(model: PreTrainedModel, integers: bool) -> Callable[[str], Weights | None]:
    """The model's matrices in blocks of two kinds, by their names; in `integers` of any bits."""
    parameters = dict(model.named_parameters())

    def take(name: str) -> Weights | None:
        data = parameters[name].detach() if name in parameters else None
        if data is None or data.dim() < 2:
            return data
        is_8_bit, (outputs, inputs) = "embed" in name or "down" in name, data.shape
        if integers:
            size = 128 if inputs % 128 == 0 else 32
            return block_rows(f"I{8 if is_8_bit else 4}_{size}", outputs, inputs, len(name))
        kind = "Q8_0" if is_8_bit else "Q4_1"
        return BlockRows(quantize(data.float().numpy(), gguf.GGMLQuantizationType[kind]), kind)

    return take


@pytest.mark.parametrize("name", ["llama", BLOCKS, INTEGERS, *more(list(CONFIGS)[3:])])
def test_no_company_changes_a_bit(unit: Unit, name: str) -> None:
    dtype, instruction_set = unit
    model = build(name).to(dtype)

    def made(threads: int) -> NativeLlamaForward:
        options: dict[str, Any] = {"threads": threads, "instruction_set": instruction_set}
        if name in (BLOCKS, INTEGERS):
            return NativeLlamaForward(model.config, in_blocks(model, name == INTEGERS), dtype=dtype, **options)
        return NativeLlamaForward.from_module(model, **options)

    def computed(threads: int, rng: random.Random | None, texts: list[list[int]]) -> list[torch.Tensor]:
        forward = made(threads)
        try:
            if rng is not None:
                return in_company(forward, cache_for(forward, model), texts, rng)
            return [forward(cache_for(forward, model).batch({0: text})).clone() for text in texts]
        finally:
            forward.close()

    for run in SEEDS:
        rng = random.Random(run)
        texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(40, LENGTH))] for _ in range(COUNT)]
        alone = computed(1, None, texts)
        for number, (one, other) in enumerate(zip(computed(rng.randint(1, 3), rng, texts), alone, strict=True)):
            same = (one == other).all(dim=1)
            assert same.all(), f"run {run}: token {int((~same).nonzero()[0])} of text {number} has other bits"


LIVES = 4  # of each seed's requests
HAPPENS = {"prefix found", "preempted", "handed over", "mirrored", "failed over", "drafts accepted"}


@pytest.mark.parametrize("kind", ["llama", GGUF, *more(PROMISED[1:])])
def test_nothing_that_happens_to_a_request_changes_a_bit(
    unit: Unit, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, instruction_set = unit
    defaults = NativeLlamaForward.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "instruction_set", instruction_set)
    path, name = saved(kind, tmp_path), str(dtype).removeprefix("torch.")
    quiet, *nodes = (
        load(path, dtype=name, threads=threads, num_speculative_tokens=drafts, max_num_seqs=16, memory_bytes=1 << 20)
        for threads, drafts in ((1, 0), (1, 4), (2, 4))
    )
    happened: collections.Counter[str] = collections.Counter()
    pairs = 0
    for seed in SEEDS:
        prompts = prompts_of(random.Random(seed))
        expected = alone(quiet, prompts)
        for life in range(LIVES):
            lives = Lives(nodes, prompts, LIVES * seed + life)
            found = lives.run(expected)
            assert found == expected, f"life {life} of seed {seed} changed a bit"
            happened += lives.happened
            pairs += len(prompts)
    assert happened.keys() == HAPPENS
    print(
        f"{instruction_set} {name} {kind}: seeds {SEEDS[0]} to {SEEDS[-1]}: {pairs} pairs, 0 with other bits; {dict(happened)}"
    )
