"""Measures, for each way to compute a model, whether a request's tokens and log-probabilities are the same bits in any company.

`python -m tests.engine.model.exact.paths` prints a row for each, `KIND ...` for some kinds of models; `--write` writes them into
docs/exact.md. What the page promises is a test (test_paths.py); what it only reports may be otherwise on another processor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.adapters import identity_of
from tests.engine.model import tiny
from tests.engine.model.adapter_files import save_adapter
from tests.engine.model.driver import DrivenRequest, Driver
from tests.engine.model.lives import GGUF, LENGTHS, NUM_TOKENS, PROMISED, Bits, Lives, bits_of, sampling, saved
from tests.engine.model.ranks_here import ranks_here
from tests.engine.model.tiny_vision import QWEN3_VL, SMOLVLM, VisionFamily, prompt_of
from tests.pictures import picture

PAGE = Path(__file__).resolve().parents[4] / "docs" / "exact.md"
BEGIN, END = "<!-- measured by tests/engine/model/exact/paths.py -->", "<!-- end -->"
HEAD = (
    "| computed by | model | type | in a batch | in chunks | with 2 threads | after preemptions | on two nodes |\n"
    "|---|---|---|---|---|---|---|---|"
)
# One of each kind of state, and those that are mixed with experts or windows.
STATES = ("qwen3-next", "qwen3.5", "mamba", "mamba2", "jamba", "recurrent-gemma", "lfm2", "minimax")
IMAGES: dict[str, VisionFamily] = {"smolvlm": SMOLVLM, "qwen3-vl": QWEN3_VL}
NATIVE, GENERAL = "native library", "general path"


@dataclasses.dataclass(frozen=True)
class Way:
    """One row: how a model is computed."""

    by: str
    kind: str
    dtype: str = "float32"
    native: bool = False
    loras: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"| {self.by} | {self.kind} | {self.dtype} |"


WAYS = (
    *(Way(NATIVE, kind, dtype, native=True) for kind in PROMISED for dtype in ("float32", "bfloat16")),
    *(Way(f"{NATIVE}, a GGUF file's blocks", GGUF, dtype, native=True) for dtype in ("float32", "bfloat16")),
    *(Way(GENERAL, kind) for kind in tiny.ARCHITECTURES),
    Way(GENERAL, "llama", "bfloat16"),
    *(Way(f"{GENERAL}, states", kind) for kind in STATES),
    Way(f"{GENERAL}, an adapter for each request", "llama", loras=2),
    *(Way(f"{GENERAL}, images", kind) for kind in IMAGES),
    *(Way(f"{GENERAL}, {ranks} ranks over gloo", "llama", ranks=ranks) for ranks in (2, 4)),
)


class Measured:
    """One way, with its answers to each prompt alone."""

    def __init__(self, way: Way, folder: Path) -> None:
        self._way = way
        self._path = IMAGES[way.kind].save(folder) if way.kind in IMAGES else saved(way.kind, folder)
        self._adapters = {
            name: str(save_adapter(self._path, folder / name, seed))
            for seed, name in enumerate(("one", "other")[: way.loras])
        }
        self._facts: list[dict[str, Any]] = [{} for _ in LENGTHS]
        if way.kind in IMAGES:
            self._prompts = [self._with_images(index) for index in range(len(LENGTHS))]
        else:
            rng = random.Random(way.kind)
            self._prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]

    def _with_images(self, index: int) -> list[int]:
        """No image, one or two; the fourth request has the second one's."""
        pictures = [picture(index % 3 + at, 40 + 10 * index, 30) for at in range((0, 1, 2, 1, 0, 2, 1)[index])]
        tokens, media, images = prompt_of(["See ", *pictures, f"and say {index}."], IMAGES[self._way.kind])
        self._facts[index] = {"media": media, "images": images}
        return tokens

    def _load(self, threads: int, drafts: int, shard: Shard | None) -> TorchRunner:
        way = self._way
        return load_runner(
            ModelConfig(path=str(self._path), dtype=way.dtype, device="cpu", threads=threads, adapters=self._adapters),
            CacheConfig(block_size=4, memory_bytes=8 << 20),
            SchedulerConfig(max_num_seqs=len(LENGTHS), max_loras=way.loras, num_speculative_tokens=drafts),
            native=way.native,
            shard=shard,
        )

    @contextlib.contextmanager
    def runner(self, threads: int, drafts: int = 0) -> Iterator[TorchRunner]:
        with ranks_here(self._way.ranks, functools.partial(self._load, threads, drafts)) as runner:
            if runner.adapters is not None:
                served = runner.adapters.served
                names = [identity_of(name, served[name]) for name in sorted(served)]
                self._facts = [{"lora": names[index % 2]} for index in range(len(LENGTHS))]
            yield runner

    def add(self, driver: Driver, index: int) -> DrivenRequest:
        return driver.add(f"r{index}", self._prompts[index], sampling(index), **self._facts[index])

    def one_by_one(self, threads: int) -> list[Bits]:
        found = []
        with self.runner(threads) as runner:
            driver = Driver(runner, 11)
            for index in range(len(LENGTHS)):
                self.add(driver, index)
                driver.generate(NUM_TOKENS)
                found.append(bits_of(driver.finish(f"r{index}")))
        return found

    def together(self, run: Callable[[Driver], None]) -> list[Bits]:
        with self.runner(1) as runner:
            driver = Driver(runner, 11)
            for index in range(len(LENGTHS)):
                self.add(driver, index)
            run(driver)
            return [bits_of(request) for request in driver.requests.values()]

    def on_two_nodes(self, alone: list[Bits]) -> list[Bits]:
        with self.runner(1, 4) as one, self.runner(1, 4) as other:
            return Lives([one, other], self._prompts, 11, lambda index: self._facts[index]).run(alone)


def with_preemptions(driver: Driver) -> None:
    while unfinished := [r for r in driver.requests.values() if len(r.output) < NUM_TOKENS]:
        for request in unfinished:
            if driver.random.random() < 0.1:
                driver.preempt(request.req_id)
        driver.step({r.req_id: driver.random.randint(1, r.pending) for r in unfinished})


def measure(way: Way) -> list[int]:
    """Returns how many of the tokens or log-probabilities have other bits than alone: in a batch, in chunks, with two threads, after
    preemptions, and in a life on two nodes."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(way, Path(folder))
        alone = measured.one_by_one(1)
        return [
            other_bits(found, alone)
            for found in (
                measured.together(lambda driver: driver.generate(NUM_TOKENS) and None),
                measured.together(lambda driver: driver.generate(NUM_TOKENS, max_chunk=11) and None),
                measured.one_by_one(2),
                measured.together(with_preemptions),
                measured.on_two_nodes(alone),
            )
        ]


def other_bits(found: list[Bits], alone: list[Bits]) -> int:
    return sum(
        mine != theirs
        for one, other in zip(found, alone, strict=True)
        for mine, theirs in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
    )


def row(way: Way, others: list[int]) -> str:
    of = NUM_TOKENS * len(LENGTHS)
    return f"{way.name} {' | '.join(f'{other} of {of}' if other else 'same' for other in others)} |"


def written_rows() -> dict[str, str]:
    """The page's rows, by the names of their ways."""
    block = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line for line in block.splitlines() if line.startswith("| ")][1:]
    return {"|".join(line.split("|")[:4]) + "|": line for line in rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.model.exact.paths", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of models, such as llama (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/exact.md; other rows stay as they are")
    options = parser.parse_args()
    rows = written_rows()
    for way in WAYS:
        if not options.kinds or way.kind in options.kinds:
            rows[way.name] = row(way, measure(way))
            print(rows[way.name], flush=True)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        table = "\n".join([HEAD, *(rows[way.name] for way in WAYS if way.name in rows)])
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
