"""What runs on a GPU, as far as a CPU can tell: recorded decode steps, and a library's kernels that we plan for.

The recorder freezes whatever the host said (tests.engine.model.recording); the library is a stand-in that holds us to
its contract (tests.engine.model.fake_flashinfer). Tokens must be those of the plain path, whatever comes and goes.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model import paths
from tandem.engine.model.attention.gathered import GatheredAttention
from tandem.engine.model.attention.interface import AttentionCall
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.batching import tensors_of
from tandem.engine.model.capabilities import ToAttend
from tandem.engine.model.cuda import flashinfer
from tandem.engine.model.cuda.capability import attention_with
from tandem.engine.model.cuda.decode_graphs import DecodeGraphs, Record
from tandem.engine.model.cuda.decode_inputs import bucket_of, table_width, token_buckets
from tandem.engine.model.cuda.flashinfer import FlashInferAttention, reason_against
from tandem.engine.model.cuda.pages import requests_of
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.runner import Batch, HostBatch
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.transformers_forward import ModelParts
from tests.engine.model import driver, fake_flashinfer, tiny
from tests.engine.model.driver import Driver
from tests.engine.model.hooks import Recorder
from tests.engine.model.recording import record
from tests.more import more

NUM_TOKENS = 10
LENGTHS = (1, 6, 19, 33)
# Every kind of layer: full and sliding in several groups, sinks, keys longer than values, soft-capping.
VARIANTS = [*((name, "gathered") for name in ("gemma3", "gpt-oss", "deepseek-v3"))]
VARIANTS += [(name, "flashinfer") for name in ("llama-untied-odd-heads", "gemma2")]
OTHERS = [(name, "gathered") for name in ("llama", "gemma2", "gpt2")]
OTHERS += [(name, "flashinfer") for name in ("mistral-window", "gemma3", "gpt2")]


def load(path: Path, pieces: object = None, drafts: int = 0) -> TorchRunner:
    """As on a GPU: what a CPU's kernels would compute goes its way there. None: all as transformers has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "pieces_for", lambda *_: pieces)
        return driver.load(path, max_num_seqs=5, num_speculative_tokens=drafts, native=False)


def graphed(runner: TorchRunner, recorder: Record = record) -> DecodeGraphs:
    graphs = DecodeGraphs(
        runner.forward,  # type: ignore[arg-type]
        recorder,
        num_groups=len(runner.info.groups),
        block_size=runner.info.groups[0].block_size,
        max_tokens=5,
        device=torch.device("cpu"),
    )
    runner.forward = graphs
    return graphs


class Case:
    def __init__(self, architecture: str, attention: str, folder: Path) -> None:
        path = tiny.save(architecture, folder)
        rng = random.Random(architecture)
        self.prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
        plain = Driver(load(path))
        for index, prompt in enumerate(self.prompts):
            plain.add(str(index), prompt)
        self.answers = plain.generate(NUM_TOKENS)
        with pytest.MonkeyPatch.context() as patch:
            if attention == "flashinfer":
                fake_flashinfer.use_here(patch)
            self.runner = load(path, DevicePieces())
        self.expected = FlashInferAttention if attention == "flashinfer" else GatheredAttention
        self.eager = self.runner.forward
        self.graphs = graphed(self.runner)


@pytest.fixture(scope="module", params=[*VARIANTS, *more((each,) for each in OTHERS)], ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("models"))  # type: ignore[call-arg]


def test_requests_come_go_and_are_preempted(case: Case) -> None:
    assert isinstance(case.eager.attention, case.expected)  # type: ignore[attr-defined]
    before = case.graphs.num_replays
    assert Driver(case.runner, 4).live(case.prompts, NUM_TOKENS) == case.answers
    assert case.graphs.num_replays > before
    assert len(case.graphs.shapes) > 1
    # No request's keys or values are in the null block: rows that pad write zeros.
    assert not case.runner.kv_cache[0].any()


def test_layers_are_announced_around_a_recorded_step(case: Case) -> None:
    driver, recorder = Driver(case.runner), Recorder()
    driver.add("r", case.prompts[1])
    driver.step({"r": len(case.prompts[1])})
    before = case.graphs.num_replays
    driver.step({"r": 1}, recorder)
    assert case.graphs.num_replays == before + 1
    layers = range(case.runner.info.num_layers)
    assert recorder.calls == [("load", layer) for layer in layers] + [("save", layer) for layer in layers]
    driver.finish_all()


def test_a_step_that_looks_at_its_own_results_runs_unrecorded(tmp_path: Path) -> None:
    runner = load(tiny.save("llama", tmp_path))
    plain = Driver(load(tmp_path / "llama"))
    plain.add("r", [5, 6, 7])
    expected = plain.generate(5)
    compute = runner.forward.compute  # type: ignore[attr-defined]

    def looking(*arguments: object) -> torch.Tensor:
        logits: torch.Tensor = compute(*arguments)
        return logits if float(logits.sum()) > 0 else logits * 1

    runner.forward.compute = looking  # type: ignore[attr-defined]
    graphs = graphed(runner)
    driver = Driver(runner)
    driver.add("r", [5, 6, 7])
    assert driver.generate(5) == expected
    assert graphs.num_replays == 0


def test_every_number_of_requests_is_recorded_ahead(tmp_path: Path) -> None:
    runner = load(tiny.save("llama", tmp_path))
    graphs = graphed(runner)
    shares: list[float] = []
    with torch.inference_mode():
        graphs.record_ahead(shares.append)
    assert sorted(size for size, _ in graphs.shapes) == [1, 2, 4, 5]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_choose_their_frequencies_are_recorded(tmp_path: Path, kind: str) -> None:
    """Up to the length that is served they have no choice, so nothing looks at a step's positions."""
    path = tiny.save("phi3" if kind == "longrope" else "llama", tmp_path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(4)], "long_factor": [2.0] * 4}
    config["rope_parameters"] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    config["rope_parameters"] |= {"original_max_position_embeddings": 128}
    if kind == "longrope":
        config["rope_parameters"] |= factors
        config["original_max_position_embeddings"] = 128
    file.write_text(json.dumps(config))
    runner = load(path)
    assert runner.info.max_model_len == 128
    graphs = graphed(runner)
    with torch.inference_mode():
        graphs.record_ahead(lambda _share: None)
    assert len(graphs.shapes) == 4
    prompts = [[5, 6, 7], list(range(3, 60))]
    driver = Driver(runner)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    expected = [answer.tokens for answer in tiny.reference(path, prompts, 8)]
    assert list(driver.generate(8).values()) == expected
    assert graphs.num_replays


def failing_at(sizes: set[int], error: type[Exception]) -> Any:
    def recorder(work: Any) -> Any:
        replay, logits = record(work)
        if logits.shape[0] in sizes:
            raise error(f"no {logits.shape[0]}")
        return replay, logits

    return recorder


def test_an_error_at_one_size_keeps_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny.save("llama", tmp_path)
    plain = Driver(load(path))
    runner = load(path)
    graphs = graphed(runner, failing_at({4, 5}, RuntimeError))
    with torch.inference_mode():
        graphs.record_ahead(lambda _share: None)
    assert sorted(size for size, _ in graphs.shapes) == [1, 2]
    assert caplog.text.count("not recorded") == 2
    driver = Driver(runner)
    for each in (plain, driver):
        for index in range(3):
            each.add(str(index), [5 + index, 6, 7])
    assert driver.generate(4) == plain.generate(4)
    assert graphs.num_replays == 0  # three requests stand in the row of four
    for index in range(2):
        driver.finish(str(index))
    driver.step({"2": 1})
    assert graphs.num_replays == 1
    assert caplog.text.count("not recorded") == 2  # tried once


def test_too_little_memory_at_load_is_said_and_on_the_way_costs_only_that_shape(tmp_path: Path) -> None:
    runner = load(tiny.save("llama", tmp_path))
    graphs = graphed(runner, failing_at({5}, torch.OutOfMemoryError))
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        graphs.record_ahead(lambda _share: None)
    driver = Driver(runner)
    for index in range(5):
        driver.add(str(index), [5 + index, 6, 7])
    driver.generate(3)
    assert graphs.num_replays == 0
    driver.finish("4")
    driver.step({"0": 1})
    assert graphs.num_replays == 1


class Unread:
    """A forward pass whose attention lists no tables, as a library's, and which computes nothing."""

    attention = SimpleNamespace(
        reads_tables=False, fixed=lambda _: SimpleNamespace(prepare=lambda _: None, begin=lambda: None)
    )
    num_layers, hidden = 1, torch.empty(0)

    def __call__(self, batch: Batch, hooks: object) -> torch.Tensor:
        return torch.zeros(len(batch.logit_rows), 8)

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        return torch.zeros(len(token_ids), 8)


def chunks_of(*shapes: tuple[int, int], num_groups: int = 1) -> Batch:
    """Requests of (tokens in the step, tokens with those before it), in pages of 16."""
    counts, contexts = (np.array(numbers, np.int32) for numbers in zip(*shapes, strict=True))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(end - count, end) for count, end in shapes])
    width = -(-int(contexts.max()) // 16)
    table = np.arange(1, len(shapes) * width + 1, dtype=np.int32).reshape(len(shapes), width)
    slots = table[np.repeat(np.arange(len(shapes)), counts), positions // 16].astype(np.int64) * 16
    slots += positions % 16
    logit_rows = (starts[1:] - 1).astype(np.int64)
    host = HostBatch(positions, starts, contexts, (slots,) * num_groups, (table,) * num_groups, logit_rows)
    tensors, (tokens,) = tensors_of(host, torch.device("cpu"), np.zeros(len(positions), np.int64))
    return Batch(token_ids=tokens, num_decodes=int((counts == 1).sum()), host=host, **tensors)


@pytest.mark.parametrize(
    ("shapes", "replayed"),
    [
        ([(1, 120_000)] * 64, True),
        ([(128, 128)] * 4, True),
        ([(512, 512)], True),
        ([(40, 2_000), *[(1, 4_000)] * 64], True),
        ([(200, 8_192)], False),
        ([(400, 30_000)], False),
        ([(500, 120_000)], False),
        ([*[(1, 1_024)] * 64, (320, 8_192)], False),
        ([(5, 4_096)] * 64, False),
    ],
    ids=lambda given: "+".join(f"{n}of{end}" for n, end in dict.fromkeys(given)) if isinstance(given, list) else "",
)
def test_a_step_that_would_read_a_long_prefix_once_for_each_token_is_not_replayed(
    shapes: list[tuple[int, int]], replayed: bool
) -> None:
    graphs = DecodeGraphs(
        Unread(),
        record,
        num_groups=1,
        block_size=16,
        max_tokens=512,
        device=torch.device("cpu"),  # type: ignore[arg-type]
    )
    graphs(chunks_of(*shapes), None)
    assert graphs.num_replays == replayed


@given(st.integers(1, 1000), st.data())
def test_a_bucket_has_room_and_wastes_little(most: int, data: st.DataObject) -> None:
    buckets = token_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    count = data.draw(st.integers(1, most))
    found = bucket_of(buckets, count)
    assert found is not None
    assert count <= found < max(count + 32, 2 * count + 1)
    assert bucket_of(buckets, most + 1) is None


@given(st.integers(1, 10_000))
def test_a_table_is_as_wide_as_the_next_power_of_two(columns: int) -> None:
    width = table_width(columns)
    assert columns <= width <= max(8, 2 * columns - 1)
    assert width & (width - 1) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"softcap": 30.0, "window": 100}, None),
        ({"sinks": True}, "sinks"),
        ({"key_dim": 80, "value_dim": 80}, "heads of 80"),
        ({"value_dim": 64}, "128 and 64"),
    ],
)
def test_what_the_library_computes(change: dict[str, object], reason: str | None) -> None:
    options = {"key_dim": 128, "value_dim": 128, "window": None, "scale": 1.0, **change}
    layer = AttentionLayer(0, 8, 2, **options)  # type: ignore[arg-type]
    found = reason_against((layer,), torch.bfloat16)
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert "float32" in (reason_against((layer,), torch.float32) or "")


class Broken(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def run(self, query: torch.Tensor, kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


class WrongOnHopper(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Hopper's kernels find something else, or nothing."""

    fails = False

    def __init__(self, *arguments: Any, backend: str, **options: Any) -> None:
        super().__init__(*arguments, backend=backend, **options)
        self._backend = backend

    def run(self, query: torch.Tensor, kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        if self._backend == "fa3" and self.fails:
            raise RuntimeError("no kernel image is available")
        super().run(query, kv_cache, out=out)
        return out.mul_(1.2) if self._backend == "fa3" else out


@pytest.mark.parametrize("wrong", [None, "otherwise", "fails"])
def test_hoppers_kernels_are_used_where_they_find_what_others_find(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer, "_kernels_for", lambda device, own_dtype: "fa3")
    monkeypatch.setattr(WrongOnHopper, "fails", wrong == "fails")
    library = fake_flashinfer if wrong is None else SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=WrongOnHopper)
    layers = (AttentionLayer(0, 4, 2, 64, 64, None, scale=0.125),)
    plan = plan_cache(layers, 4)
    cache = torch.zeros(plan.shape(3), dtype=torch.bfloat16)
    attention = FlashInferAttention(library, cache, plan, layers, 16, cache.dtype)
    attention.try_out()
    assert ("without fa3" in caplog.text) is (wrong is not None)
    assert not cache.any()


class Watched(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Notes which kernels attend to how many rows."""

    runs: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, *arguments: Any, backend: str, **options: Any) -> None:
        super().__init__(*arguments, backend=backend, **options)
        self._backend = backend

    def run(self, query: torch.Tensor, kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        self.runs.append((self._backend, query.shape[0]))
        return super().run(query, kv_cache, out=out)


@pytest.mark.parametrize(
    ("shapes", "hopper", "runs"),
    [
        ([(1, 40), (1, 9), (5, 21), (30, 37)], True, [("fa2", 7), ("fa3", 30)]),
        ([(1, 40), (1, 9), (5, 21), (30, 37)], False, [("fa2", 37)]),
        ([(1, 40), (16, 16)], True, [("fa2", 17)]),
        ([(17, 40), (30, 30)], True, [("fa3", 47)]),
    ],
)
def test_decodes_and_drafts_beside_a_chunk_are_left_to_the_kernels_that_pack_them(
    shapes: list[tuple[int, int]], hopper: bool, runs: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request still gets what it gets alone, in a layer with a window and in one without."""
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer, "_kernels_for", lambda device, own_dtype: "fa3" if hopper else "fa2")
    layers = tuple(AttentionLayer(i, 4, 2, 64, 64, window=9 if i else None, scale=0.125) for i in range(2))
    plan = plan_cache(layers, 16)
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Watched)
    cache = torch.zeros(plan.shape(20), dtype=torch.bfloat16)
    attention = FlashInferAttention(library, cache, plan, layers, 64, cache.dtype)
    attention.try_out()
    torch.manual_seed(0)
    cache.copy_(torch.randn(cache.shape))

    tokens = sum(count for count, _ in shapes)
    given = [[torch.randn(heads, tokens, 64).bfloat16() for heads in (4, 2, 2)] for _ in layers]

    def attended(batch: Batch, rows: slice) -> list[torch.Tensor]:
        step = attention.begin(batch)

        def of_layer(index: int) -> torch.Tensor:
            query, key, value = (part[:, rows] for part in given[index])
            return step.attend(index, query, key, value, AttentionCall(0.125))

        return [of_layer(layer.index) for layer in layers]

    batch = chunks_of(*shapes, num_groups=len(plan.groups))
    Watched.runs.clear()
    together = attended(batch, slice(None))
    assert Watched.runs == runs * len(layers)
    start = 0
    for request, (count, _) in enumerate(shapes):
        rows = slice(start, start + count)
        alone = dataclasses.replace(
            batch,
            host=requests_of(batch.host, request, request + 1),
            slot_mapping=tuple(slots[rows] for slots in batch.slot_mapping),
        )
        for whole, one in zip(together, attended(alone, rows), strict=True):
            torch.testing.assert_close(whole[rows], one)
        start += count


class Misread(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Plans for other pages than it is given."""

    how = ""

    def plan(self, *given: torch.Tensor, **options: Any) -> None:
        query_start, page_start, pages, last = given
        if self.how == "backwards":
            pages = pages.flip(0)
        elif self.how == "ascending":
            pages = torch.cat([part.sort().values for part in pages.split(page_start.diff().tolist())])
        elif self.how == "full":
            last = torch.full_like(last, options["page_size"])
        elif self.how == "first":
            pages = pages[: int(page_start[1])].repeat(len(last))
        super().plan(query_start, page_start, pages, last, **options)


@pytest.mark.parametrize(
    ("library", "how", "dtype", "sinks", "used"),
    [
        (fake_flashinfer, "", torch.bfloat16, False, True),
        (fake_flashinfer, "", torch.float32, False, False),
        (fake_flashinfer, "", torch.bfloat16, True, False),
        (Broken, "", torch.bfloat16, False, False),
        (None, "", torch.bfloat16, False, False),
        # It reads other pages than it is given.
        (Misread, "", torch.bfloat16, False, True),
        *((Misread, how, torch.bfloat16, False, False) for how in ("backwards", "ascending", "full", "first")),
    ],
)
def test_the_library_is_tried_out_before_it_is_relied_on(
    library: Any, how: str, dtype: torch.dtype, sinks: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has several requests, whose pages lie in descending order, and the last ones are half filled."""
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(Misread, "how", how)
    if isinstance(library, type):
        library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=library)
    layers = tuple(
        AttentionLayer(index, 4, 2, 64, 64, window=None if index else 9, scale=0.125, sinks=sinks) for index in range(2)
    )
    plan = plan_cache(layers, 4)
    cache = torch.zeros(plan.shape(9), dtype=dtype)
    shape = ForwardShape(max_requests=2, max_model_len=16)
    made = attention_with(library, ToAttend(cache, plan, ModelParts(layers), shape, None, dtype))
    assert isinstance(made, FlashInferAttention) == used
    assert not cache.any()
