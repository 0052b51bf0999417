"""What guessing from the text gains: tokens per step and time per token, with guesses, without, and where guesses cannot be right.

    python -m benchmarks.speculation [--model smollm2] [--draft NAME] [--guesses 4] [--tokens 192] [--requests 1] [--threads N] [--rounds 3]
                                     [--json FILE]

There are two kinds of prompts: code that is to be repeated with a change, and chats. Both are answered greedily by engines that differ only in
`scheduler.num_speculative_tokens` and `scheduler.max_draft_loss` and take turns; their tokens must be equal. A third kind draws from sixteen
tokens at random: guesses are found all the time and are seldom right, and guessing only as it pays may cost 3%. With `--draft` that model guesses
instead of the text. The fastest round of each prompt counts, because other work on the machine only adds time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from tandem.cluster.models.store import prepare_model
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.machine.resources import usable_cores
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

CEILING = 1.03  # times the time without guesses, where no guess is right
_FUNCTION = """def area(shape, width, height):
    if shape == "square":
        return width * width
    if shape == "rectangle":
        return width * height
    if shape == "triangle":
        return width * height / 2
    raise ValueError("unknown shape: " + shape)
"""
CODE = [
    f"Write this function again with the name `surface` in place of `area`:\n\n{_FUNCTION}",
    f"Repeat this code exactly, and add a line for the shape `circle`:\n\n{_FUNCTION}",
    f"Copy this function and add type hints:\n\n{_FUNCTION}",
]
CHAT = [
    "Why is the sky blue in the day and red in the evening?",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "What should I pack for a week in the mountains in autumn?",
]
ENGINES = {
    "none": {"num_speculative_tokens": 0},
    "as they pay": {},
    "always": {"max_draft_loss": 1.0},
}


class Run(msgspec.Struct):
    seconds: list[float]  # of each group of prompts that were answered at once
    tokens: list[list[int]]
    steps: int
    drafted: int
    accepted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--draft", default="", metavar="NAME", help="a draft model, such as the model itself")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--requests", type=int, default=1, help="at once")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(found_here(options.model), found_here(options.draft) if options.draft else None, options)
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def found_here(name: str) -> Path:
    return Path(prepare_model(name, lambda what, share: None).path)


def measure(model: Path, draft: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def prompts(texts: list[str]) -> list[list[int]]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        return [
            list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in chats
        ]

    greedy = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    few = dict.fromkeys(range(1000, 1016), 1e4)
    kinds = {
        "code": (prompts(CODE), greedy),
        "chat": (prompts(CHAT), greedy),
        "noise": (prompts(CHAT), msgspec.structs.replace(greedy, temperature=100.0, seed=1, logit_bias=few)),
    }
    engines = {name: engine_of(model, draft, options, changes) for name, changes in ENGINES.items()}
    return {
        "model": options.model, "draft": options.draft, "guesses": options.guesses, "requests": options.requests, "threads": options.threads,
        "ceiling": CEILING,
        "kinds": {kind: compare(engines, *asked, options) for kind, asked in kinds.items()},
    }  # fmt: skip


def engine_of(
    model: Path, draft: Path | None, options: argparse.Namespace, changes: dict[str, Any]
) -> Engine:
    cache = CacheConfig(memory_bytes=512 << 20, prefix_caching=False)
    config = SchedulerConfig(max_model_len=2048, **{"num_speculative_tokens": options.guesses, **changes})
    described = ModelConfig(path=str(model), threads=options.threads, draft=str(draft or ""))
    runner: TorchRunner = load_runner(described, cache, config)
    info = runner.info
    scheduler = Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len)
    return Engine(scheduler, runner, None, ahead=config.plans_ahead(info.device))


def compare(
    engines: dict[str, Engine],
    prompts: list[list[int]],
    sampling: SamplingParams,
    options: argparse.Namespace,
) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            runs[name].append(run(engine, prompts, sampling, options.requests))
    said = runs["none"][0].tokens
    if any(one.tokens != said for taken in runs.values() for one in taken):
        raise SystemExit("the tokens differ with and without guesses")
    base = fastest(runs["none"])
    return {name: figures(taken, base) for name, taken in runs.items()}


def fastest(runs: list[Run]) -> float:
    return sum(map(min, *(one.seconds for one in runs))) if len(runs) > 1 else sum(runs[0].seconds)


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams, at_once: int) -> Run:
    """Measures decoding only: seconds and steps from when all requests have their first token."""
    before = engine.scheduler.stats()
    seconds: list[float] = []
    steps = 0
    tokens: list[list[int]] = []
    for first in range(0, len(prompts), at_once):
        said = {f"r{first + index}": list[int]() for index in range(at_once)}
        for index, name in enumerate(said):
            engine.add_request(
                Request(
                    name,
                    RequestFacts(prompt_token_ids=prompts[(first + index) % len(prompts)], sampling=sampling),
                )
            )
        seconds.append(0.0)
        while engine.scheduler.has_unfinished_requests():
            decodes = all(said.values())
            began = time.perf_counter()
            updates = engine.step().updates
            if decodes:
                seconds[-1] += time.perf_counter() - began
                steps += 1
            for update in updates:
                said[update.request_id] += update.token_ids
        tokens += said.values()
    after = engine.scheduler.stats()
    return Run(
        seconds,
        tokens,
        steps,
        after.speculative_drafted - before.speculative_drafted,
        after.speculative_accepted - before.speculative_accepted,
    )


def figures(runs: list[Run], base: float) -> dict[str, float]:
    seconds = fastest(runs)
    last = runs[-1]
    decoded = sum(map(len, last.tokens)) - len(last.tokens)
    return {
        "tokens_per_step": decoded / last.steps,
        "ms_per_token": 1e3 * seconds / decoded,
        "of_none": seconds / base,
        "drafted": last.drafted,
        "accepted": last.accepted,
    }


def print_table(found: dict[str, Any]) -> None:
    table = Table(
        title=f"{found['model']}{', guessed by ' + found['draft'] if found['draft'] else ''}, {found['requests']} at once, up to {found['guesses']} guesses, {found['threads']} threads"
    )
    for name in ("prompts", "guesses", "tokens per step", "ms per token", "of none", "drafted", "right"):
        table.add_column(name, justify="left" if name in ("prompts", "guesses") else "right")
    for kind, engines in found["kinds"].items():
        for name, row in engines.items():
            limit = f" (at most {found['ceiling']})" if (kind, name) == ("noise", "as they pay") else ""
            table.add_row(
                kind, name, f"{row['tokens_per_step']:.2f}", f"{row['ms_per_token']:.2f}", f"{row['of_none']:.3f}{limit}",
                f"{row['drafted']:.0f}", f"{row['accepted']:.0f}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
