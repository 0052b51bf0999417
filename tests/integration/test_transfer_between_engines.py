"""Two engines with the real model in one process, without Ray: one continues from KV that the other computed, with every connector and
between caches of different shapes; and the layers of a long prompt are sent while the next ones are computed."""

from __future__ import annotations

import contextlib
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
from tests.integration.one_engine import PATIENT, OneEngine, hand_over, hand_over_all
from tests.more import more
from tests.waiting import until

NEW_TOKENS = 8
PROMPT = [3 + number % 50 for number in range(70)]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> Iterator[OneEngine]:
    with OneEngine.start(smollm2_path, "alone", 16, None) as engine:
        yield engine


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
    config = TransferConfig(**PATIENT | {"connector": connector}, direction=direction)
    scheduler = SchedulerConfig(async_scheduling=AsyncScheduling.ALWAYS if ahead else AsyncScheduling.NEVER)
    prompts = [[1000 + 7 * number % 20_000 for number in range(length)] for length in (37, 300)]
    with (
        OneEngine.start(smollm2_path, "p", blocks[0], config, scheduler=scheduler) as producer,
        OneEngine.start(smollm2_path, "c", blocks[1], config, scheduler=scheduler) as consumer,
    ):
        hand_over_all(producer, consumer, prompts, [alone.answer("r", prompt, NEW_TOKENS) for prompt in prompts])
        assert producer.stats().outcomes == {"sent": 2}
        if direction == "push":
            # Each prompt is one chunk: what overlaps are layers.
            assert producer.stats().bytes_overlapped > 0


@contextlib.contextmanager
def of_other_weights(tmp_path: Path, on_failure: LoadFailurePolicy) -> Iterator[tuple[OneEngine, OneEngine]]:
    """Nodes whose models have one name, as on two machines whose folders differ."""
    folders = [save("llama", tmp_path / machine) for machine in ("one", "other")]
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 2
    save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
    config = TransferConfig(connector="nixl", on_failure=on_failure)
    with (
        OneEngine.start(folders[0], "p", 16, config, memory_bytes=4 << 20) as producer,
        OneEngine.start(folders[1], "c", 16, config, memory_bytes=4 << 20) as consumer,
    ):
        yield producer, consumer


def test_kv_of_other_weights_is_refused_though_both_models_have_one_name(tmp_path: Path) -> None:
    """Each reads the prompt with its own weights."""
    with of_other_weights(tmp_path, LoadFailurePolicy.RECOMPUTE) as (producer, consumer):
        infos = [engine.engine.runner.info for engine in (producer, consumer)]
        assert infos[0].name == infos[1].name
        expected = consumer.answer("alone", PROMPT, NEW_TOKENS)
        assert producer.answer("alone", PROMPT, NEW_TOKENS) != expected
        assert hand_over(producer, consumer, "r", PROMPT, NEW_TOKENS) == expected
        assert consumer.stats().bytes_received == 0
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 2 * len(PROMPT)


def test_a_request_whose_kv_does_not_arrive_fails_where_the_operator_says_so(tmp_path: Path) -> None:
    """The producer refuses a transfer to other weights. That ends this request, and nothing else."""
    with of_other_weights(tmp_path, LoadFailurePolicy.FAIL) as (producer, consumer):
        expected = consumer.answer("before", PROMPT, NEW_TOKENS)
        computed = consumer.engine.scheduler.stats().prompt_tokens_computed
        with pytest.raises(KVLoadFailed, match="the prompt's KV did not arrive: the KV caches differ"):
            hand_over(producer, consumer, "r", PROMPT, NEW_TOKENS)
        stats = consumer.engine.scheduler.stats()
        assert stats.prompt_tokens_computed == computed
        assert stats.free_blocks == stats.total_blocks
        assert consumer.answer("after", PROMPT, NEW_TOKENS) == expected


@pytest.mark.parametrize("direction", ["push", *more(["pull"])])
def test_hidden_states_are_written_where_the_prompt_is_read(tmp_path: Path, direction: str) -> None:
    """Once, though both nodes are told of the file, and the prompt is in both prefix caches the second time."""
    model = save("llama", tmp_path / "model")
    config = TransferConfig(connector="nixl", direction=direction)
    engines = [
        OneEngine.start(
            model, name, 16, config, memory_bytes=4 << 20, prefix_caching=True, hidden_states=tmp_path / name
        )
        for name in "pc"
    ]
    producer, consumer = engines
    try:
        expected = consumer.answer("alone", PROMPT, NEW_TOKENS)
        for name in ("first", "second"):
            sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, hidden_states=name)
            assert hand_over(producer, consumer, name, PROMPT, NEW_TOKENS, sampling=sampling) == expected
    finally:
        for engine in engines:
            engine.close()
    files = [tmp_path / "p" / f"{name}.safetensors" for name in ("first", "second")]
    until(lambda: all(file.exists() for file in files), 30)
    found = [load_file(file) for file in files]
    assert found[0]["token_ids"].tolist() == PROMPT
    torch.testing.assert_close(found[0]["hidden_states"], found[1]["hidden_states"])
    assert not list((tmp_path / "c").iterdir())
