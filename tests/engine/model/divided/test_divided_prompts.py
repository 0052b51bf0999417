"""Ranks that read prompts together give the whole model's answers, in whatever chunks and batches, and whichever caches they have."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.batching import tensors_of
from tandem.engine.model.cuda import capability as cuda_capability
from tandem.engine.model.cuda import decode_graphs
from tandem.engine.model.divided import division, exchange
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.sampling import SamplingParams
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver
from tests.engine.model.hooks import Recorder
from tests.engine.model.ranks_here import EndOfRank, ranks_here
from tests.more import more

NUM_TOKENS = 5
load = partial(driver.load, native=False)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny chunks are divided, too."""
    monkeypatch.setattr(division, "LEAST_ROWS", 1)


@pytest.fixture(scope="module")
def saved() -> dict[str, tiny.Case]:
    return {}


# Ranks, contexts, and whether each rank has a cache of its own. With four ranks in two contexts, two share the matrices.
WAYS = [(2, 2, False), (2, 2, True), (3, 3, False), (4, 2, False), (4, 2, True)]
# Windows, soft-capping, a chunk's own attention, layers that read another layer's keys, latents, experts, and positions counted by the model.
MODELS = [
    ("llama", *WAYS[0]),
    ("mistral-window", *WAYS[2]),
    ("gemma2", *WAYS[4]),
    ("gemma3n", *WAYS[0]),
    ("deepseek-v2", *WAYS[1]),
    *more([("mixtral", *WAYS[1]), ("llama", *WAYS[1]), ("gemma3", *WAYS[3]), ("llama4", *WAYS[1]), ("opt", *WAYS[0]), ("gpt-oss", *WAYS[1])]),
    *more([("deepseek-v3", *WAYS[4]), ("qwen3", *WAYS[2]), ("gpt2", *WAYS[1]), ("gemma3n", *WAYS[1]), ("phi3", *WAYS[3])]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "contexts", "apart"), MODELS)
def test_mixed_batches_in_chunks(
    name: str,
    ranks: int,
    contexts: int,
    apart: bool,
    saved: dict[str, tiny.Case],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if name not in saved:
        saved[name] = tiny.case_of(name, tmp_path_factory.mktemp("divided"), NUM_TOKENS)
    path, prompts, answers = saved[name]
    tokens, logprobs = ([getattr(each, what) for each in answers] for what in ("tokens", "logprobs"))
    with ranks_here(ranks, partial(load, path), lines=[] if apart else None, contexts=contexts) as runner:
        Driver(runner).expect(prompts, tokens, logprobs)
        runner.forget_requests()
        live = Driver(runner, 1).live(prompts, NUM_TOKENS)
        assert [live[str(index)] for index in range(len(prompts))] == tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("small"))


PROMPT = [(7 * token) % 90 + 3 for token in range(40)]


def late_on_other_ranks(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, done: list[int]) -> None:
    """Makes this method slow on every rank but rank 0, the slower the higher the rank's number is, and appends its first argument to `done`
    when it returns there."""
    work = getattr(kind, name)

    def late(self: object, layer: int, *given: object) -> object:
        of_rank, _, rank = threading.current_thread().name.partition("rank ")
        if of_rank:
            return work(self, layer, *given)
        for _ in range(20 * int(rank) ** 2):
            torch.ones(256, 256) @ torch.ones(256, 256)
        result = work(self, layer, *given)
        done.append(layer)
        return result

    monkeypatch.setattr(kind, name, late)


@pytest.mark.parametrize(("ranks", "apart"), [(2, False), (2, True), (4, True)])
def test_a_step_is_over_when_no_rank_uses_its_blocks(
    small: Path, ranks: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are slow. A block that they wrote later might be another request's by then."""
    attended: list[int] = []
    with ranks_here(ranks, partial(load, small), lines=[] if apart else None, contexts=2) as runner:
        layers = range(runner.info.num_layers)
        late_on_other_ranks(monkeypatch, exchange._Step, "attend", attended)
        driver = Driver(runner)
        driver.add("r", PROMPT)
        driver.step({"r": len(PROMPT)})
        assert sorted(attended) == sorted([*layers] * (ranks - 1))
        written: list[int] = []
        late_on_other_ranks(monkeypatch, exchange.KVExchange, "_write", written)
        driver.step({"r": 1})
        others = ranks // 2 if apart else 0
        assert sorted(written) == sorted([*layers] * others), "a decode is the first context's"


@pytest.mark.parametrize(("apart", "alone"), [(False, False), (True, False), (True, True)])
def test_a_layer_is_saved_when_all_ranks_have_written_it(
    small: Path, apart: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alone`: rank 0 computes the step by itself, because no prompt is long enough for both."""
    monkeypatch.setattr(division, "LEAST_ROWS", 1000 if alone else 1)
    written: list[int] = []

    class Watching(Recorder):
        def save_kv_layer(self, layer: int) -> None:
            super().save_kv_layer(layer)
            assert layer in written, f"layer {layer} leaves before every rank has written it"

    with ranks_here(2, partial(load, small), lines=[] if apart else None, contexts=2) as runner:
        late_on_other_ranks(monkeypatch, exchange.KVExchange, "_write", written)
        hooks = Watching()
        driver = Driver(runner)
        driver.add("r", PROMPT)
        driver.step({"r": len(PROMPT)}, hooks)
        layers = list(range(runner.info.num_layers))
        assert [layer for what, layer in hooks.calls if what == "save"] == layers


def test_what_is_asked_of_each_token_is_rank_0s(small: Path) -> None:
    """Drafts, and log-probabilities of the prompt."""
    (answer,) = tiny.reference(small, [PROMPT], NUM_TOKENS)
    asking = SamplingParams(temperature=0.0, prompt_logprobs=0)
    told = []
    for ranks in (1, 2):
        with ranks_here(ranks, partial(load, small, num_speculative_tokens=3), contexts=ranks) as runner:
            driver = Driver(runner)
            driver.add("asks", PROMPT, asking)
            driver.add("r", PROMPT)
            driver.step({"asks": len(PROMPT), "r": len(PROMPT)})
            told.append([one.logprob for one in driver.last.prompt_logprobs["asks"] if one is not None])
            driver.drafts["r"] = answer.tokens[1:3]
            assert driver.generate(NUM_TOKENS) == {"asks": answer.tokens, "r": answer.tokens}
            assert driver.num_accepted >= 2
    assert told[1] == pytest.approx(told[0], abs=2e-4)
    assert len(told[0]) == len(PROMPT) - 1


def test_ranks_that_read_together_record_no_steps(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where other models' decodes are recorded. What these ranks exchange in a step is not the same in the next one."""

    def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        return work, work()

    monkeypatch.setattr(cuda_capability, "capability", cuda_capability.OnCuda)
    monkeypatch.setattr(cuda_capability.OnCuda, "step_memory", lambda *_: None)
    monkeypatch.setattr(decode_graphs, "CudaRecorder", lambda _device: record)
    (answer,) = tiny.reference(small, [PROMPT], NUM_TOKENS)
    with ranks_here(2, partial(load, small), lines=[], contexts=2) as runner:
        driver = Driver(runner)
        driver.add("r", PROMPT)
        assert driver.generate(NUM_TOKENS) == {"r": answer.tokens}


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("qwen3-next", {}, "it keeps recurrent states, .* Set pools.<pool>.context_parallel to 1"),
        ("llama", {"pooling": "last"}, "makes vectors of all tokens .* Set pools.<pool>.context_parallel to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_together_is_refused(name: str, settings: dict[str, str], why: str, tmp_path: Path) -> None:
    path = tiny.save(name, tmp_path)

    def refused(shard: Shard | None) -> TorchRunner:
        """Rank 0 raises its own error. The other rank must refuse it as well, and end."""
        assert shard is not None
        if shard.rank == 0:
            return load(path, shard, **settings)
        with pytest.raises(ConfigurationError):
            load(path, shard, **settings)
        raise EndOfRank

    with pytest.raises(ConfigurationError, match=why):  # noqa: SIM117
        with ranks_here(2, refused, contexts=2):
            pass


def batch_of(requests: list[tuple[int, int]], asked: list[int]) -> Batch:
    """`requests`: (rows, context) of each, those of one row first."""
    lengths = np.array([rows for rows, _ in requests])
    contexts = np.array([context for _, context in requests], np.int32)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(context - rows, context) for rows, context in requests])
    slots, tables = positions * 10, np.arange(len(requests), dtype=np.int32)[:, None]
    host = HostBatch(positions, query_start, contexts, (slots,), (tables,), np.array(asked, np.int64))
    tensors, (token_ids,) = tensors_of(host, torch.device("cpu"), positions + 1)
    return Batch(token_ids=token_ids, num_decodes=int((lengths == 1).sum()), host=host, **tensors)


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_one_ranks_and_those_asked_for_rank_0s(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    requests = [(1, rng.randint(1, 50)) for _ in range(rng.randint(0, 4))]
    requests += [(rows, rows + rng.choice((0, 17))) for rows in sorted(rng.choices(range(2, 90), k=rng.randint(1, 4)))]
    total = sum(rows for rows, _ in requests)
    asked = sorted(rng.sample(range(total), rng.randint(0, min(4, total))))
    batch = batch_of(requests, asked)
    runs = division.divide(batch, ranks)
    if runs is None:
        return
    rows = [division.rows_of(own) for own in runs]
    assert sorted(np.concatenate(rows).tolist()) == list(range(total))
    for rank, own in enumerate(runs):
        part = division.part_of(batch, own)
        assert part.positions.tolist() == batch.host.positions[rows[rank]].tolist()
        assert part.token_ids.tolist() == (part.positions + 1).tolist()
        assert part.slot_mapping[0].tolist() == (part.positions * 10).tolist()
        assert part.num_decodes == (batch.num_decodes if rank == 0 else 0)
        assert rows[rank][part.logit_rows.numpy()].tolist() == (asked if rank == 0 else [])
        for number, run in enumerate(own):
            assert part.block_tables[0][number].tolist() == [run.request]
            assert part.context_lens[number] == batch.host.positions[run.end - 1] + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("before", [0, 10_000])
def test_ranks_have_equal_work(ranks: int, before: int) -> None:
    """Of a long chunk beside decodes, which rank 0 has besides. Cut into as many parts as ranks, a prompt's last part has 15 of 64 of the pairs."""
    requests = [*[(1, 300)] * 8, (8192, before + 8192)]
    batch = batch_of(requests, [*range(8), 8199])
    runs = division.divide(batch, ranks)
    assert runs is not None
    rows = [len(division.rows_of(own)) for own in runs]
    pairs = [int((batch.positions[division.rows_of(own)] + 1).sum()) for own in runs]
    assert max(rows) <= 1.01 * min(rows)
    assert max(pairs) <= 1.02 * min(pairs)
