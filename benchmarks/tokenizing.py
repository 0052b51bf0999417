"""What tokenizing a long chat costs a router: the whole chat at its first turn, and its next turn.

    python -m benchmarks.tokenizing FOLDER [--rounds N] [--json FILE]

FOLDER has a model's tokenizer.json with `<|im_start|>` and `<|im_end|>` among its tokens. Costs are CPU time of the process.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.api.text.tokenizer import Tokenizer

CHARACTERS = (10_000, 220_000, 300_000)  # the last is about 60,000 tokens
MESSAGES = 20
NEW_CHARACTERS = 300
WORDS = (
    "the quick brown fox jumps over a lazy dog and then it sleeps until sun comes up again while "
    "seventeen engineers discuss latency budgets; def compute(x): return x**2 + 3"
)
COLUMNS = {
    "characters": "{characters:,.0f}",
    "tokens": "{tokens:,.0f}",
    "whole ms": "{whole_ms:.1f}",
    "first ms": "{first_ms:.1f}",
    "next turn ms": "{next_turn_ms:.1f}",
}


def message(rng: random.Random, role: str, characters: int) -> str:
    known = WORDS.split()
    words = " ".join(rng.choice(known) for _ in range(characters // 6))
    return f"<|im_start|>{role}\n{words}<|im_end|>\n"


async def once(folder: str, characters: int, seed: int) -> dict[str, float]:
    tokenizer, rng = Tokenizer.from_folder(folder), random.Random(seed)
    roles = ("user", "assistant") * (MESSAGES // 2)
    chat = "".join(message(rng, role, characters // MESSAGES) for role in roles)
    next_turn = chat + message(rng, "user", NEW_CHARACTERS)
    began = time.process_time()
    whole = tokenizer.encode(chat, special=False)
    after_whole = time.process_time()
    first = await tokenizer.encode_async(chat, special=False)
    after_first = time.process_time()
    following = await tokenizer.encode_async(next_turn, special=False)
    after_next = time.process_time()
    if first != whole or following != tokenizer.encode(next_turn, special=False):
        raise AssertionError("the ids differ from those of the whole text")
    return {
        "characters": len(chat),
        "tokens": len(whole),
        "whole_ms": (after_whole - began) * 1e3,
        "first_ms": (after_first - after_whole) * 1e3,
        "next_turn_ms": (after_next - after_first) * 1e3,
    }


def measure(folder: str, characters: int, rounds: int) -> dict[str, Any]:
    found = [asyncio.run(once(folder, characters, seed)) for seed in range(rounds)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="with a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5, help="of each length; medians are shown")
    options = parser.parse_args()
    rows = [measure(options.folder, characters, options.rounds) for characters in CHARACTERS]
    return report(options, rows, table_of(f"A chat of {MESSAGES} messages", rows, COLUMNS, left=0))


if __name__ == "__main__":
    run(main)
