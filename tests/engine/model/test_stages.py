"""A model cut into pipeline stages gives the whole model's answers."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaModel

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.gathered import GatheredCache
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide.stages import layers_of_stage
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver, answer_of
from tests.engine.model.hooks import Recorder
from tests.engine.model.ranks_here import EndOfRank, ranks_here
from tests.engine.model.test_wide import held_after
from tests.more import more

NUM_TOKENS = 5
FAMILIES = ("llama", "gemma3", "mixtral", *more(["qwen2", "qwen3", "gemma2", "phi3"]))
# (number of ranks, number of stages)
SHAPES = ((2, 2), (4, 2))


load = partial(driver.load, native=False)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Case:
    return tiny.case_of(request.param, tmp_path_factory.mktemp("stages"), NUM_TOKENS)


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-ranks-in-{shape[1]}-stages")
def staged(request: pytest.FixtureRequest, saved: tiny.Case) -> Iterator[TorchRunner]:
    ranks, stages = request.param
    with ranks_here(ranks, partial(load, saved[0]), stages) as runner:
        yield runner


def expect_answers(staged: TorchRunner, saved: tiny.Case) -> None:
    _, prompts, answers = saved
    tokens, logprobs = ([getattr(each, what) for each in answers] for what in ("tokens", "logprobs"))
    Driver(staged).expect(prompts, tokens, logprobs)


def test_mixed_batches_in_chunks_in_stages(staged: TorchRunner, saved: tiny.Case) -> None:
    expect_answers(staged, saved)


@pytest.mark.parametrize(("ranks", "stages"), SHAPES)
def test_mixed_batches_in_chunks_in_stages_whose_caches_are_apart(ranks: int, stages: int, saved: tiny.Case) -> None:
    """Each rank keeps the KV of its layers and heads in its own memory."""
    with ranks_here(ranks, partial(load, saved[0]), stages, []) as apart:
        assert apart.info.layers is not None
        assert apart.kv_cache.shape[1] == apart.info.layers.slots
        expect_answers(apart, saved)


def test_the_bytes_of_the_cache_lie_where_one_rank_has_them(staged: TorchRunner, saved: tiny.Case) -> None:
    """So what one node computed another goes on from, whichever is cut."""
    path, prompts, answers = saved
    with ranks_here(1, partial(load, path)) as whole:
        for nodes in ((whole, staged), (staged, whole)):
            held_after(*nodes, prompts[2], answers[2].tokens)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("small"))


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def lines(request: pytest.FixtureRequest) -> list[socket.socket] | None:
    return [] if request.param else None


def test_every_layer_is_saved_once_and_in_order(small: Path, lines: list[socket.socket] | None) -> None:
    with ranks_here(2, partial(load, small), 2, lines) as runner:
        driver = Driver(runner)
        driver.add("r", list(range(3, 20)))
        hooks = Recorder()
        driver.step({"r": 17}, hooks)
        layers = transformers.AutoConfig.from_pretrained(small).num_hidden_layers
        assert [layer for kind, layer in hooks.calls if kind == "save"] == list(range(layers))


def test_a_layer_is_saved_when_its_stage_has_written_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, lines: list[socket.socket] | None
) -> None:
    """The second stage is slow, and the first steps make no logits."""
    layers = transformers.AutoConfig.from_pretrained(small).num_hidden_layers
    written: collections.Counter[int] = collections.Counter()
    write = GatheredCache.write

    def late(cache: GatheredCache, layer: int, *given: torch.Tensor, **options: int) -> None:
        if layer == layers - 1:
            for _ in range(20):
                torch.ones(256, 256) @ torch.ones(256, 256)
        write(cache, layer, *given, **options)
        written[layer] += 1

    class Counting(Recorder):
        def save_kv_layer(self, layer: int) -> None:
            super().save_kv_layer(layer)
            seen.append((layer, written[layer]))

    seen: list[tuple[int, int]] = []
    with ranks_here(2, partial(load, small), 2, lines) as runner:
        monkeypatch.setattr(GatheredCache, "write", late)
        driver = Driver(runner)
        driver.add("r", list(range(3, 20)))
        for step in range(3):
            seen.clear()
            driver.step({"r": 5}, Counting())
            assert seen == [(layer, step + 1) for layer in range(layers)]


@pytest.mark.parametrize("poor", [None, 0, 3])
def test_blocks_are_as_many_as_the_poorest_rank_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poor: int | None
) -> None:
    """A node's memory is shared by what a block takes on each rank: the first of two stages has two of three layers."""
    monkeypatch.setitem(
        tiny.ALL, "three", lambda: transformers.LlamaConfig(**{**tiny.ALL["llama"]().to_dict(), "num_hidden_layers": 3})
    )
    path, memory_bytes = tiny.save("three", tmp_path), 24 << 20
    made: dict[int, TorchRunner] = {}

    def loading(shard: Shard | None) -> TorchRunner:
        assert shard is not None
        mine = memory_bytes // 4 if shard.rank == poor else memory_bytes
        made[shard.rank] = load(path, shard, memory_bytes=mine, max_num_seqs=4096)
        return made[shard.rank]

    with ranks_here(4, loading, 2, []):
        pass
    caches = [made[rank].kv_cache for rank in range(4)]
    blocks = {len(cache) for cache in caches} | {made[rank].info.num_blocks for rank in range(4)}
    assert len(blocks) == 1
    assert [cache.shape[1] for cache in caches] == [2, 2, 1, 1]
    held = sum(cache.nbytes for cache in caches)
    budget = memory_bytes if poor is None else memory_bytes // 4
    assert held <= budget < held + 2 * held // len(caches[0])


def test_a_rank_holds_the_weights_of_its_own_layers_alone(small: Path) -> None:
    held: dict[int, int] = {}

    def counting(path: Path, shard: Shard | None) -> TorchRunner:
        runner = load(path, shard)
        assert shard is not None
        held[shard.rank] = parameters(runner)
        return runner

    with ranks_here(2, partial(counting, small), 2):
        pass
    model = transformers.AutoModelForCausalLM.from_pretrained(small)
    each = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    ends = sum(parameter.numel() for parameter in (model.lm_head.weight, model.model.embed_tokens.weight))
    assert sorted(held) == [0, 1]
    assert sum(held.values()) <= each * model.config.num_hidden_layers + ends + 4 * model.config.hidden_size


def parameters(runner: TorchRunner) -> int:
    forward = runner.forward
    model = getattr(forward, "_model", None) or forward._forward._model  # type: ignore[attr-defined]
    return sum(parameter.numel() for parameter in model.parameters())


def refusal(path: Path, stages: int = 2) -> str:
    """The refusal, which must be the same on every rank."""

    said: list[str] = []

    def loading(shard: Shard | None) -> TorchRunner:
        try:
            return load(path, shard)
        except ConfigurationError as error:
            said.append(str(error))
            if shard is not None and shard.rank:
                raise EndOfRank from error
            raise

    with pytest.raises(ConfigurationError), ranks_here(stages, loading, stages):
        pass
    assert len(said) == stages
    assert len(set(said)) == 1
    return said[0]


@pytest.mark.parametrize(
    ("name", "stages", "said"),
    [
        pytest.param("llama", 3, "stages: it has 2 layers", id="more stages than layers"),
        pytest.param("gpt2", 2, "transformers does not say what the layers", id="nothing is said of the layers"),
        pytest.param("gemma3n", 2, "2 stages: ", id="layers read the embedding, though their plan does not say so"),
    ],
)
def test_what_cannot_be_cut_into_stages_is_refused(name: str, stages: int, said: str, tmp_path: Path) -> None:
    assert said in refusal(tiny.save(name, tmp_path), stages)


@pytest.fixture
def changed_llama(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Llama with another body of its loop over layers: what a model's code may do though its plan says nothing of it."""

    def change(how: str) -> None:
        whole = LlamaModel.forward

        def forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
            if how == "embedding":
                embedded = self.embed_tokens(input_ids)
                hook = self.layers[-1].register_forward_pre_hook(lambda _, args: (args[0] + embedded,))
            elif how == "twice":
                hook = self.layers[-1].register_forward_pre_hook(
                    lambda _, args: (self.layers[0](args[0], **given | rotary_of(self, args[0])),)
                )
            else:
                hook = self.layers[0].register_forward_hook(lambda _, args, output: output * 1.5)
            try:
                return whole(self, input_ids=input_ids, **given)
            finally:
                hook.remove()

        monkeypatch.setattr(LlamaModel, "forward", forward)

    return change


def rotary_of(model: Any, hidden: torch.Tensor) -> dict[str, Any]:
    positions = torch.arange(hidden.shape[1])[None]
    return {"position_embeddings": model.rotary_emb(hidden, positions), "past_key_values": None}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("embedding", "layer 1 reads more of the layers before it"),
        ("twice", "do not run one after another, each of them once"),
    ],
)
def test_what_a_model_does_beside_its_plan_is_found(
    changed_llama: Callable[[str], None], small: Path, how: str, said: str
) -> None:
    changed_llama(how)
    assert said in refusal(small)


def expect_in_two_stages(path: Path) -> None:
    prompt = list(range(3, 20))
    (expected,) = tiny.reference(path, [prompt], NUM_TOKENS)
    with ranks_here(2, partial(load, path), 2) as runner:
        assert answer_of(runner, prompt, NUM_TOKENS) == expected.tokens


def test_what_a_model_does_between_two_layers_is_done_once(changed_llama: Callable[[str], None], small: Path) -> None:
    """By the next stage, which the stage's last layer sends its output as it is."""
    changed_llama("between")
    expect_in_two_stages(small)


def test_an_embedding_and_a_head_of_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = partial(
        transformers.GPTNeoXConfig, vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False
    )  # fmt: skip
    monkeypatch.setitem(tiny.ALL, "gpt-neox", config)
    expect_in_two_stages(tiny.save("gpt-neox", tmp_path))


@given(st.integers(1, 64), st.integers(1, 8))
def test_stages_share_all_layers_in_order(total: int, stages: int) -> None:
    if total < stages:
        return
    parts = [layers_of_stage(total, stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(total))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1], default=max(sizes))
