"""The expected answers: transformers' own `generate`, greedy, in float32."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

NEW_TOKENS = 16
LENGTHS = [5, 15, 16, 17, 33, 64, 200, 600]

_WORDS = (
    "river mountain engine paper window quiet seven yellow travel market garden winter music bread letter "
    "ocean teacher signal copper harvest ladder morning village thunder marble pocket silver forest candle"
)


@dataclasses.dataclass(frozen=True)
class ExpectedAnswer:
    prompt: list[int]
    tokens: list[int]  # what greedy decoding adds
    text: str
    finish: str


def make_prompts(tokenizer, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """One prompt per length. No two share a first block, so that none is served from the cached blocks of another."""
    rng = random.Random(7)
    words = _WORDS.split()
    prompts = []
    for number, length in enumerate(lengths):
        text = f"{number * 37 + 11} " + " ".join(rng.choice(words) for _ in range(length * 2))
        prompts.append(tokenizer.encode(text, add_special_tokens=False)[:length])
        assert len(prompts[-1]) == length
    return prompts


def greedy_answers(model_path: Path, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[ExpectedAnswer]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.eval()
    eos = model.generation_config.eos_token_id
    eos_ids = set(eos if isinstance(eos, list) else [eos])
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, num_beams=1
            )
            tokens = out[0, len(prompt) :].tolist()
            stopped = tokens[-1] in eos_ids
            visible = [t for t in tokens if t not in eos_ids]
            answers.append(
                ExpectedAnswer(
                    prompt, tokens, tokenizer.decode(visible, skip_special_tokens=True), "stop" if stopped else "length"
                )
            )
    return answers
