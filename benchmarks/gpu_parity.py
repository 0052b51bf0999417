"""Whether a device gives the CPU's answers: the same tokens in float32, and in half precision log-probabilities that are as near to
float32's as the CPU's own in that precision."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_report import Dtype
from benchmarks.lib.engines import load_engine, request_of
from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import SamplingParams

_LENGTHS = (1, 7, 33, 64, 150, 301)
_NUM_TOKENS = 24
# Both devices round, each in its own order: so twice the CPU's error is allowed, and a little for chance.
_MOST_ERROR = 2.0
_FLOOR = 1e-3


class Parity(msgspec.Struct, frozen=True):
    what: str
    holds: bool
    said: str


class ParitySide:
    """One engine. Prompts are cut into chunks and mixed with decodes."""

    def __init__(
        self, path: Path, dtype: Dtype, device: str, *, native: bool, exact: Literal["auto", "require"] = "auto"
    ) -> None:
        cache = CacheConfig(memory_bytes=256 << 20, prefix_caching=False)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96, max_model_len=1024)
        model = ModelConfig(path=str(path), dtype=dtype, device=device, exact=exact)
        self._engine, _ = load_engine(model, cache, config, native=native)
        self._count = 0

    def _updates(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[TokenChunk]]:
        """Sends all prompts at once. Returns what each request's steps said."""
        found: dict[str, list[TokenChunk]] = {}
        for prompt in prompts:
            self._count += 1
            found[f"r{self._count}"] = []
            self._engine.add_request(request_of(f"r{self._count}", prompt, sampling))
        while self._engine.scheduler.has_unfinished_requests():
            for update in self._engine.step().updates:
                found[update.request_id].append(update)
        return list(found.values())

    def answers(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        return [
            [token for update in updates for token in update.token_ids] for updates in self._updates(prompts, sampling)
        ]

    def logprobs(self, texts: list[list[int]]) -> torch.Tensor:
        """Returns the log-probability of every token after each text's first."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        said = [update for updates in self._updates(texts, sampling) for update in updates]
        entries = [entry for update in said for entry in update.prompt_logprobs or ()]
        return torch.tensor([entry.logprob for entry in entries if entry is not None])

    def chosen_logprobs(self, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
        """Returns answers, and the log-probabilities that decode steps gave their tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0)
        said = self._updates(prompts, sampling)
        answers = [[token for update in updates for token in update.token_ids] for updates in said]
        values = [entry.logprob for updates in said for update in updates for entry in update.logprobs or ()]
        return answers, torch.tensor(values)


def check_parity(path: Path, device: torch.device) -> list[Parity]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in _LENGTHS]
    exact = ParitySide(path, "float32", "cpu", native=False)
    found = [_same_tokens(exact, ParitySide(path, "float32", str(device), native=True), prompts)]
    halves: tuple[Dtype, ...] = ("bfloat16", "float16")
    for dtype in halves if device.type == "cuda" else halves[:1]:
        cpu = ParitySide(path, dtype, "cpu", native=False)
        found.append(_near_enough(dtype, exact, cpu, ParitySide(path, dtype, str(device), native=True), prompts))
    return found


def _same_tokens(exact: ParitySide, tried: ParitySide, prompts: list[list[int]]) -> Parity:
    different = total = 0
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature=temperature, max_tokens=_NUM_TOKENS, seed=7, top_p=0.95, ignore_eos=True)
        for right, ours in zip(exact.answers(prompts, sampling), tried.answers(prompts, sampling), strict=True):
            different += right != ours
            total += 1
    said = f"float32: {total - different} of {total} answers, greedy and seeded, token for token"
    return Parity("float32 tokens", different == 0, said)


def _near_enough(
    dtype: Dtype, exact: ParitySide, cpu: ParitySide, tried: ParitySide, prompts: list[list[int]]
) -> Parity:
    """Compares prompts, and decode steps: the other engine computes the device's own answers as prompts."""
    answers, decoded = tried.chosen_logprobs(prompts)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    right = exact.logprobs(texts)
    allowed = _MOST_ERROR * float((cpu.logprobs(texts) - right).abs().mean()) + _FLOOR
    read = float((tried.logprobs(texts) - right).abs().mean())
    ends = torch.tensor([len(text) - 1 for text in texts]).cumsum(0).tolist()
    generated = torch.cat([right[end - _NUM_TOKENS : end] for end in ends])
    wrote = float((decoded - generated).abs().mean())
    said = f"{dtype}: log-probabilities off by {read:.4f} in prompts, {wrote:.4f} in decodes; {allowed:.4f} allowed"
    return Parity(f"{dtype} log-probabilities", read <= allowed and wrote <= allowed, said)


def check_same_bits(path: Path, device: torch.device) -> list[Parity]:
    """docs/exact.md: requests have the same tokens and log-probabilities together as one by one, to the bit."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in _LENGTHS]
    try:
        tried = ParitySide(path, "bfloat16", str(device), native=True, exact="require")
    except ConfigurationError as error:
        return [Parity("the same bits", holds=False, said=str(error))]
    answers, found = tried.chosen_logprobs(prompts)
    one_by_one = [tried.chosen_logprobs([prompt]) for prompt in prompts]
    alone = torch.cat([logprobs for _, logprobs in one_by_one])
    other = int((found != alone).sum())
    holds = other == 0 and answers == [answer for one, _ in one_by_one for answer in one]
    return [Parity("the same bits", holds, f"{other} of {len(alone)} log-probabilities have other bits alone")]


def check_against_transformers(path: Path, device: torch.device) -> list[Parity]:
    """Compares log-probabilities in half precision with those of transformers in float32. As much error is allowed as transformers itself
    makes in half precision."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kind, rng = model.config.model_type, random.Random(1)
    vocab = int(model.config.get_text_config().vocab_size)
    texts = [[rng.randrange(3, vocab) for _ in range(length)] for length in _LENGTHS if length > 1]
    right = _by_transformers(model, texts)
    rounded = _by_transformers(model.to(torch.bfloat16), texts)
    allowed = _MOST_ERROR * float((rounded - right).abs().mean()) + _FLOOR
    ours = ParitySide(path, "bfloat16", str(device), native=True).logprobs(texts)
    off = float((ours - right).abs().mean())
    said = f"log-probabilities off by {off:.4f} from transformers; {allowed:.4f} allowed"
    return [Parity(f"{kind} in bfloat16", off <= allowed, said)]


@torch.inference_mode()
def _by_transformers(model: Any, texts: list[list[int]]) -> torch.Tensor:
    found = []
    for text in texts:
        logits = model(torch.tensor([text])).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0])
    return torch.cat(found)
