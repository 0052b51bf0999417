"""Two engines with the real model in one process, without Ray: one continues from KV that the other computed, with every connector and
between caches of different shapes; and the layers of a long prompt are sent while the next ones are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.base.errors import KVLoadFailed
from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.kvtransfer.config import LoadFailurePolicy, TransferConfig
from tandem.wire.sampling import SamplingParams
from tests.engine.model.tiny import save
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 8


def prompt_of(length: int) -> list[int]:
    return [1000 + 7 * number % 20_000 for number in range(length)]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> Iterator[OneEngine]:
    engine = OneEngine.start(smollm2_path, "alone", 16, None)
    yield engine
    engine.engine.shutdown()


CASES = [("nixl", "pull", (32, 16), True), ("nccl", "push", (16, 16), False)]
MORE_CASES = [
    ("nixl", "push", (16, 32), False),
    ("nixl", "push", (16, 16), False),
    ("nixl", "push", (32, 16), False),
    ("nixl", "pull", (16, 32), False),
    ("nccl", "pull", (32, 16), False),
    ("nixl", "push", (16, 16), True),
]


@pytest.mark.parametrize(("connector", "direction", "blocks", "ahead"), [*CASES, *more(MORE_CASES)])
def test_the_tokens_are_those_of_one_engine(
    smollm2_path: Path, alone: OneEngine, connector: str, direction: str, blocks: tuple[int, int], ahead: bool
) -> None:
    """`ahead`: both engines plan a step while the previous one runs."""
    config = TransferConfig(connector=connector, direction=direction)
    scheduler = SchedulerConfig(async_scheduling=AsyncScheduling.ALWAYS if ahead else AsyncScheduling.NEVER)
    producer, consumer = (
        OneEngine.start(smollm2_path, name, block_size, config, scheduler=scheduler)
        for name, block_size in zip("pc", blocks, strict=True)
    )
    try:
        for length in (37, 200, 777):
            name, prompt = f"r{length}", prompt_of(length)
            expected = alone.answer(name, prompt, NEW_TOKENS)
            assert hand_over(producer, consumer, name, prompt, NEW_TOKENS) == expected
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0
        assert producer.stats().outcomes == {"sent": 3}
        if direction == "push":
            # Each prompt is one chunk: what overlaps are layers.
            assert producer.stats().bytes_overlapped > 0
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()


def test_kv_of_other_weights_is_refused_though_both_models_have_one_name(tmp_path: Path) -> None:
    """As on two machines whose folders differ. Each reads the prompt with its own weights."""
    folders = [save("llama", tmp_path / machine) for machine in ("one", "other")]
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 2
    save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
    config = TransferConfig(connector="nixl")
    producer, consumer = (
        OneEngine.start(folder, name, 16, config, memory_bytes=4 << 20)
        for name, folder in zip("pc", folders, strict=True)
    )
    prompt = [3 + number % 50 for number in range(70)]
    try:
        infos = [engine.engine.runner.info for engine in (producer, consumer)]
        assert infos[0].name == infos[1].name
        expected = consumer.answer("alone", prompt, NEW_TOKENS)
        assert producer.answer("alone", prompt, NEW_TOKENS) != expected
        assert hand_over(producer, consumer, "r", prompt, NEW_TOKENS) == expected
        assert consumer.stats().bytes_received == 0
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 2 * len(prompt)
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()


def test_a_request_whose_kv_does_not_arrive_fails_where_the_operator_says_so(tmp_path: Path) -> None:
    """The producer refuses a transfer to other weights. That ends this request, and nothing else."""
    folders = [save("llama", tmp_path / machine) for machine in ("one", "other")]
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 2
    save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
    config = TransferConfig(connector="nixl", on_failure=LoadFailurePolicy.FAIL)
    producer, consumer = (
        OneEngine.start(folder, name, 16, config, memory_bytes=4 << 20)
        for name, folder in zip("pc", folders, strict=True)
    )
    prompt = [3 + number % 50 for number in range(70)]
    try:
        expected = consumer.answer("before", prompt, NEW_TOKENS)
        computed = consumer.engine.scheduler.stats().prompt_tokens_computed
        with pytest.raises(KVLoadFailed, match="the prompt's KV did not arrive: the KV caches differ"):
            hand_over(producer, consumer, "r", prompt, NEW_TOKENS)
        stats = consumer.engine.scheduler.stats()
        assert stats.prompt_tokens_computed == computed
        assert stats.free_blocks == stats.total_blocks
        assert consumer.answer("after", prompt, NEW_TOKENS) == expected
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_hidden_states_are_written_where_the_prompt_is_read(tmp_path: Path, direction: str) -> None:
    """Once, though both nodes are told of the file, and the prompt is in both prefix caches the second time."""
    model = save("llama", tmp_path / "model")
    config = TransferConfig(connector="nixl", direction=direction)
    prompt = [3 + number % 50 for number in range(70)]
    engines = [
        OneEngine.start(
            model, name, 16, config, memory_bytes=4 << 20, prefix_caching=True, hidden_states=tmp_path / name
        )
        for name in "pc"
    ]
    producer, consumer = engines
    try:
        expected = consumer.answer("alone", prompt, NEW_TOKENS)
        for name in ("first", "second"):
            sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, hidden_states=name)
            assert hand_over(producer, consumer, name, prompt, NEW_TOKENS, sampling=sampling) == expected
    finally:
        for engine in engines:
            engine.close()
    until = time.monotonic() + 30
    files = [tmp_path / "p" / f"{name}.safetensors" for name in ("first", "second")]
    while not all(file.exists() for file in files):
        assert time.monotonic() < until
        time.sleep(0.01)
    found = [load_file(file) for file in files]
    assert found[0]["token_ids"].tolist() == prompt
    torch.testing.assert_close(found[0]["hidden_states"], found[1]["hidden_states"])
    assert not list((tmp_path / "c").iterdir())
