"""A model shared by several ranks gives the whole model's answers, in whatever chunks and batches it runs."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.base.errors import ConfigurationError
from tandem.engine.model import paths, probe
from tandem.engine.model.attention.gathered import GatheredCache
from tandem.engine.model.compressed import latents_wing
from tandem.engine.model.cuda.decode_graphs import DecodeGraphs
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.fused.cpu import cpu_pieces
from tandem.engine.model.fused.find import Fused, fuse
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wide import cut, joint_sums
from tandem.engine.model.wide.forward import LeadingForward
from tandem.node.ranks.group import GroupCollectives
from tandem.wire.pooling import Pooling, PoolingKind
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver, answer_of
from tests.engine.model.hooks import Recorder
from tests.engine.model.ranks_here import EndOfRank, ranks_here
from tests.more import more

NUM_TOKENS = 5
WIDE = [
    # A tied head, norms of each head, windows with soft-capping, experts, and matrices whose outputs all ranks get.
    *(("llama", 2), ("qwen3", 2), ("gemma2", 4), ("mixtral", 4), ("phi3", 2)),
    # Latents, which all ranks keep: transformers' plan cuts V2's heads, and leaves V3's whole.
    *(("deepseek-v2", 2), ("deepseek-v3", 4)),
    *more(
        (each,) for each in [("llama", 4), ("qwen2", 4), ("qwen3", 4), ("gemma3", 4), ("qwen3-moe", 2), ("llama4", 2)]
    ),
]


load = partial(driver.load, native=False)


@dataclasses.dataclass
class WideCase:
    runner: TorchRunner
    path: Path
    kv_heads: int
    prompts: list[list[int]]
    answers: list[tiny.Answer]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tiny.Case]:
    return {}


@pytest.fixture(scope="module", params=WIDE, ids=lambda param: f"{param[0]}-on-{param[1]}")
def wide(
    request: pytest.FixtureRequest, saved: dict[str, tiny.Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WideCase]:
    name, width = request.param
    if name not in saved:
        saved[name] = tiny.case_of(name, tmp_path_factory.mktemp("wide"), NUM_TOKENS)
    path, prompts, answers = saved[name]
    config = transformers.AutoConfig.from_pretrained(path)
    with ranks_here(width, partial(load, path)) as runner:
        keeps_latents = hasattr(config, "kv_lora_rank") and latents_wing() is not None
        kv_heads = 1 if keeps_latents else config.num_key_value_heads
        yield WideCase(runner, path, kv_heads, prompts, answers)


def test_mixed_batches_in_chunks_on_ranks(wide: WideCase) -> None:
    tokens, logprobs = ([getattr(each, what) for each in wide.answers] for what in ("tokens", "logprobs"))
    Driver(wide.runner).expect(wide.prompts, tokens, logprobs)


def test_the_ranks_keep_one_cache_with_all_heads(wide: WideCase) -> None:
    assert wide.runner.kv_cache.shape[3] == wide.runner.info.num_kv_heads == wide.kv_heads


@pytest.mark.parametrize(("width", "experts"), [(4, 1), *more([(2, 2)])])
def test_a_rank_has_some_experts_whole(
    width: int, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of them, shared by the ranks."""
    joined: list[tuple[int, ...]] = []
    join = cut.join_parts

    def noted(name: str, model: transformers.PreTrainedModel, shard: Shard) -> None:
        join(name, model, shard)
        joined.extend(tuple(one.shape) for key, one in model.named_parameters() if "experts" in key)

    monkeypatch.setattr(cut, "join_parts", noted)
    path = tiny.save("mixtral", tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    shapes = {tuple(one.shape) for key, one in whole.named_parameters() if "experts" in key}
    with ranks_here(width, partial(load, path)):
        assert set(joined) == {(experts, *shape[1:]) for shape in shapes}


@pytest.mark.parametrize("adds_alone", [True, False])
def test_routed_and_shared_experts_are_summed_once(
    adds_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that does more than add the two keeps two sums."""
    path, prompt = tiny.save("deepseek-v3", tmp_path), [5, 9, 11]
    (answer,) = tiny.reference(path, [prompt], NUM_TOKENS)
    if not adds_alone:
        monkeypatch.setattr(joint_sums, "agrees", lambda *_: False)
    counted: collections.Counter[int] = collections.Counter()
    add_up = GroupCollectives.sum

    def counting(group: GroupCollectives, tensor: torch.Tensor) -> None:
        counted[threading.get_ident()] += 1
        add_up(group, tensor)

    with ranks_here(2, partial(load, path)) as runner:
        monkeypatch.setattr(GroupCollectives, "sum", counting)
        driver = Driver(runner)
        driver.add("r", prompt)
        driver.step({"r": 3})
        # The embedding's, attention's in two layers, a dense layer's, and the experts'.
        assert set(counted.values()) == {1 + 2 + 1 + (1 if adds_alone else 2)}
        assert driver.generate(NUM_TOKENS)["r"] == answer.tokens


def test_where_latents_are_not_known_each_rank_keeps_the_keys_of_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = tiny.save("deepseek-v2", tmp_path), [5, 9, 11, 7, 3]
    (answer,) = tiny.reference(path, [prompt], NUM_TOKENS)
    monkeypatch.setattr(probe, "latents_wing", lambda: None)
    with ranks_here(2, partial(load, path)) as runner:
        assert runner.kv_cache.shape[3] == 4
        assert answer_of(runner, prompt, NUM_TOKENS, max_chunk=2) == answer.tokens


def test_the_bytes_of_the_cache_lie_where_one_rank_has_them(wide: WideCase) -> None:
    """So what one computed another goes on from, whichever is wide."""
    prompt, answer = wide.prompts[2], wide.answers[2].tokens
    with ranks_here(1, partial(load, wide.path)) as whole:
        held = [held_after(*nodes, prompt, answer) for nodes in ((whole, wide.runner), (wide.runner, whole))]
        assert held[0].isfinite().sum() > held[0].numel() // 2
        torch.testing.assert_close(held[0], held[1], rtol=1e-4, atol=1e-5, equal_nan=True)


def held_after(first: TorchRunner, second: TorchRunner, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What the first node keeps of a prompt, from which the second one goes on to the right answer."""
    computing, going_on = Driver(first), Driver(second, 1)
    computing.add("r", prompt)
    computing.step({"r": len(prompt)})
    held = first.kv_cache[[block for table in computing.requests["r"].blocks for block in table]]
    going_on.adopt("r", computing)
    assert going_on.generate(len(answer))["r"] == answer
    first.forget_requests()
    second.forget_requests()
    return held


# Only its experts are cut, and its first layers have none: no sum follows them.
AFMOE: dict[str, Any] = {
    "num_hidden_layers": 3, "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "head_dim": 8, "layer_types": ["full_attention"] * 3,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "afmoe"])
def test_a_layer_is_saved_when_all_ranks_have_written_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is slow, so what asked rank 0 alone would be early."""
    monkeypatch.setitem(tiny.ALL, "afmoe", lambda: transformers.AfmoeConfig(**tiny.COMMON | AFMOE))
    path = tiny.save(name, tmp_path)
    written: collections.Counter[int] = collections.Counter()
    write = GatheredCache.write

    def late(cache: GatheredCache, layer: int, *given: torch.Tensor, **options: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            for _ in range(20):
                torch.ones(256, 256) @ torch.ones(256, 256)
        write(cache, layer, *given, **options)
        written[layer] += 1

    class Counting(Recorder):
        def save_kv_layer(self, layer: int) -> None:
            super().save_kv_layer(layer)
            assert written[layer] == 2, f"layer {layer} leaves before every rank has written it"

    with ranks_here(2, partial(load, path), lines=[]) as runner:
        monkeypatch.setattr(GatheredCache, "write", late)
        hooks = Counting()
        driver = Driver(runner)
        driver.add("r", [5, 9, 11])
        driver.step({"r": 3}, hooks)
        layers = range(runner.info.num_layers)
        assert [layer for what, layer in hooks.calls if what == "load"] == list(layers)
        assert [layer for what, layer in hooks.calls if what == "save"] == list(layers)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("small"))


def test_drafts_change_no_token_on_ranks(small: Path) -> None:
    prompt = [5, 9, 11, 5, 9]
    (answer,) = tiny.reference(small, [prompt], NUM_TOKENS)
    with ranks_here(2, partial(load, small, num_speculative_tokens=3)) as runner:
        driver = Driver(runner)
        driver.add("r", prompt)
        driver.step({"r": len(prompt)})
        driver.drafts["r"] = answer.tokens[1:3]
        assert driver.generate(NUM_TOKENS)["r"] == answer.tokens
        assert driver.num_accepted >= 2


def fused_on_ranks(path: Path, dtype: str = "float32") -> tuple[list[Fused | None], list[int]]:
    """What each of two ranks has fused, and what they say."""
    found: list[Fused | None] = []

    def noted(*given: Any) -> Fused | None:
        found.append(fuse(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.engine.model.fused.find.fuse", noted)
        with ranks_here(2, partial(load, path, dtype=dtype)) as runner:
            return found, answer_of(runner, [5, 9, 11, 7, 3], NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "device"), [("llama", False), ("qwen3", True), *more([("llama", True), ("qwen3", False)])]
)
def test_the_layers_of_each_rank_are_fused(
    name: str, device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save(name, tmp_path)
    if device:
        monkeypatch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
    elif cpu_pieces(torch.float32, 1) is None:
        pytest.skip("this processor has no kernels")
    ranks, said = fused_on_ranks(path)
    layers = transformers.AutoConfig.from_pretrained(path).num_hidden_layers
    for fused in ranks:
        assert fused is not None
        assert (fused.gated, fused.merged, fused.rotary) == (layers, layers, layers)
    assert len(ranks) == 2
    (answer,) = tiny.reference(path, [[5, 9, 11, 7, 3]], NUM_TOKENS)
    assert said == answer.tokens


def test_no_rank_is_fused_if_one_would_compute_something_else(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
    least = Shard.least
    monkeypatch.setattr(Shard, "least", lambda shard, number: least(shard, 0 if number == 1 and shard.rank else number))
    ranks, said = fused_on_ranks(small)
    assert ranks == [None, None]
    (answer,) = tiny.reference(small, [[5, 9, 11, 7, 3]], NUM_TOKENS)
    assert said == answer.tokens


class RecordingRanks:
    """Two ranks that record steps, as on GPUs. A recording computes its whole shape again. `fails`: the sizes that a rank cannot record."""

    def __init__(self, path: Path, fails: dict[int, set[int]]) -> None:
        self.load = partial(self._load, path)
        self.graphs: dict[int, DecodeGraphs] = {}
        self._fails = fails

    def _load(self, path: Path, shard: Shard | None) -> TorchRunner:
        assert shard is not None
        runner = load(path, shard, pooling="last")
        leading = runner.forward if isinstance(runner.forward, LeadingForward) else None
        fails = self._fails.get(shard.rank, set())

        def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            logits = work()
            if logits.shape[0] in fails:
                raise RuntimeError("this rank cannot")

            def replay() -> None:
                work()  # its results lie where the first run's do

            return replay, logits

        graphs = DecodeGraphs(
            leading._forward if leading is not None else runner.forward,  # type: ignore[arg-type]
            record,
            num_groups=len(runner.info.groups),
            block_size=runner.info.groups[0].block_size,
            max_tokens=8,
            device=torch.device("cpu"),
            shard=shard,
        )
        with torch.inference_mode():
            graphs.record_ahead(lambda _share: None)
        self.graphs[shard.rank] = graphs
        if leading is not None:
            leading._forward = graphs
        else:
            runner.forward = graphs
        return runner


@pytest.mark.parametrize("fails", [{}, {1: {4, 8}}], ids=["alike", "one-cannot"])
def test_all_ranks_compute_a_step_in_the_same_shape(
    small: Path, fails: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request for a vector only rank 0 sees that no recorded step will do, and a rank may be unable to record a shape."""
    meeting, shapes = threading.Barrier(2), {}
    add_up = GroupCollectives.sum

    def compared(group: GroupCollectives, tensor: torch.Tensor) -> None:
        shapes[threading.get_ident()] = tuple(tensor.shape)
        meeting.wait(60)
        seen = set(shapes.values())
        meeting.wait(60)
        assert len(seen) == 1, "ranks would sum rows of different tokens"
        add_up(group, tensor)

    ranks = RecordingRanks(small, fails)
    with ranks_here(2, ranks.load) as runner:
        monkeypatch.setattr(GroupCollectives, "sum", compared)
        driver = Driver(runner)
        driver.add("vector", [5, 9, 11, 7, 3], pooling=Pooling(PoolingKind.LAST))
        driver.step({"vector": 5})
        assert ranks.graphs[0].num_replays == 0
        driver.finish("vector")
        driver.add("words", [5, 9, 11, 7, 3])
        (answer,) = tiny.reference(small, [[5, 9, 11, 7, 3]], NUM_TOKENS)
        assert driver.generate(NUM_TOKENS)["words"] == answer.tokens
    assert ranks.graphs[0].shapes == ranks.graphs[1].shapes
    replays = NUM_TOKENS - 1 if fails else NUM_TOKENS
    assert [ranks.graphs[rank].num_replays for rank in range(2)] == [replays] * 2


@pytest.mark.parametrize(
    ("name", "width", "why"),
    [
        ("gpt2", 2, "transformers has no plan that cuts a model of type gpt2"),
        ("gpt-oss", 2, "transformers has no plan that cuts"),
        ("llama-untied-odd-heads", 2, "6 heads of queries and 3 of keys and values cannot be shared equally.* 1, 3, 6"),
        ("deepseek-v3", 3, "4 heads of queries.* cannot be shared equally.* 1, 2, 4"),
        ("qwen3.5", 2, "cannot be served on .* ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, width: int, why: str, tmp_path: Path) -> None:
    path = tiny.save(name, tmp_path)
    with pytest.raises(ConfigurationError, match=why):  # noqa: SIM117
        with ranks_here(width, partial(_load_or_none, path)):
            pass


def _load_or_none(path: Path, shard: Shard | None) -> TorchRunner:
    """Rank 0 loads its part and raises its own error. The other ranks must refuse theirs as well, and end."""
    assert shard is not None
    if shard.rank == 0:
        return load(path, shard)
    with pytest.raises(ConfigurationError):
        load(path, shard)
    raise EndOfRank
