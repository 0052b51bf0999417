"""What ranks that read a prompt together gain: each rank's rows, pairs of tokens and CPU time, and the bytes that go between ranks, beside one
rank and beside ranks that share matrices.

Runs a model of Llama's kind with random weights, on real processes with one thread each, on the same path. The prompts are read in turns. On a
machine with fewer free cores than ranks `wall` is of no use: the longest CPU time is what a rank with a core of its own would take, without its
waits. `bytes` is what each rank gives to others in one prompt, where each has a cache of its own: what it puts into sums and gathers.

    python -m benchmarks.long_prompts [--prompts 2048 8192] [--ranks 2] [--turns 3] [--chunk 2048] [--json FILE]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.lib.engines import EngineBench, engine_of, random_prompts, save_random_model
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.shard import Collectives
from tandem.node.ranks.processes import shares_of
from tandem.node.ranks.supervisor import Ranks

_SILENCE_S = 60.0  # long, because the machine may be busy and no rank must count as lost here
_VOCABULARY = 4096


class CountedCollectives:
    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.bytes = 0

    def sum(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.nbytes
        self._inner.sum(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return self._inner.gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.nbytes
        self._inner.broadcast(tensor)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._inner.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._inner.receive(tensor, rank)


class ReadingCosts(msgspec.Struct):
    """The costs of reading one prompt: medians of the turns."""

    ranks: str
    prompt: int
    wall_s: float
    cpu_s: list[float]  # of each rank
    bytes: int

    @property
    def longest_cpu_s(self) -> float:
        return max(self.cpu_s)


COLUMNS = {
    "ranks": "{ranks}",
    "prompt": "{prompt:,}",
    "CPU s of each rank": "{each}",
    "of one rank's": "{share:.2f}",
    "wall s": "{wall_s:.2f}",
    "MB to others": "{mb:.1f}",
}


def save_model(folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1 << 17,
    )  # fmt: skip
    save_random_model(config, folder)


class Reader:
    """An engine of so many ranks, in contexts or with shared matrices."""

    def __init__(self, folder: Path, ranks: int, contexts: int, longest: int, chunk: int) -> None:
        self.name = "one" if ranks == 1 else f"{ranks} read together" if contexts > 1 else f"{ranks} share"
        self._ended = contextlib.ExitStack()
        config = EngineConfig(
            model=ModelConfig(path=str(folder), dtype="float32", device="cpu", threads=1),
            cache=CacheConfig(memory_bytes=ranks * (6 * 2 * 2 * 64 * 4) * (longest + 1024), prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_model_len=longest + 64, step_target_ms=0),
        )
        self._counted: list[CountedCollectives] = []
        shard = None
        self._pids: list[int] = []
        if ranks > 1:
            supervised = Ranks(
                "benchmark", ranks, config, shares_of([], ranks, ranks), LogsConfig(), contexts=contexts, apart=True,
                silence_s=_SILENCE_S, lost=print,
            )  # fmt: skip
            self._ended.callback(supervised.stop)
            shard = supervised.start()
            all_ranks, across = self._counting(shard.collectives), shard.across
            shard = dataclasses.replace(shard, collectives=all_ranks, across=across and self._counting(across))
        runner = load_runner(config.model, config.cache, config.scheduler, native=False, shard=shard)
        if ranks > 1:
            supervised.await_ready()
            self._pids = supervised.pids
        self._bench = EngineBench(engine_of(runner, config.cache, config.scheduler))

    def _counting(self, collectives: Collectives) -> CountedCollectives:
        self._counted.append(CountedCollectives(collectives))
        return self._counted[-1]

    def read(self, prompt: list[int]) -> ReadingCosts:
        given = sum(one.bytes for one in self._counted)
        before = self._cpu_s()
        wall_s = self._bench.prefill(prompt)
        cpu_s = [after - then for after, then in zip(self._cpu_s(), before, strict=True)]
        given = sum(one.bytes for one in self._counted) - given
        return ReadingCosts(self.name, len(prompt), wall_s, cpu_s, given)

    def _cpu_s(self) -> list[float]:
        ticks = os.sysconf("SC_CLK_TCK")
        others = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return [time.process_time(), *((int(fields[11]) + int(fields[12])) / ticks for fields in others)]

    def close(self) -> None:
        self._ended.close()


def middle(found: list[ReadingCosts]) -> ReadingCosts:
    first = found[0]
    return msgspec.structs.replace(
        first,
        wall_s=statistics.median(one.wall_s for one in found),
        cpu_s=[statistics.median(each) for each in zip(*(one.cpu_s for one in found), strict=True)],
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=2048)
    options = parser.parse_args()
    figures: list[ReadingCosts] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ended:
        save_model(Path(name))
        readers = []
        for ranks, contexts in ((1, 1), (options.ranks, 1), (options.ranks, options.ranks)):
            readers.append(Reader(Path(name), ranks, contexts, max(options.prompts), options.chunk))
            ended.callback(readers[-1].close)
        for length in options.prompts:
            (prompt,) = random_prompts(1, length, _VOCABULARY)
            found: list[list[ReadingCosts]] = [[] for _ in readers]
            for turn in range(options.turns + 1):
                for reader, costs in zip(readers, found, strict=True):
                    read = reader.read(prompt)
                    if turn:  # the first pays for what is made on demand
                        costs.append(read)
            figures += map(middle, found)
    one = {each.prompt: each.longest_cpu_s for each in figures if len(each.cpu_s) == 1}
    rows = [
        msgspec.structs.asdict(each)
        | {
            "each": ", ".join(f"{cpu_s:.2f}" for cpu_s in each.cpu_s),
            "share": each.longest_cpu_s / one[each.prompt],
            "mb": each.bytes / 1e6,
        }
        for each in figures
    ]
    title = f"one thread each, chunks of {options.chunk}; load {os.getloadavg()[0]:.1f}"
    return report(options, figures, table_of(title, rows, COLUMNS))


if __name__ == "__main__":
    run(main)
