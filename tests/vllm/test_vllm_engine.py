"""vLLM behind Tandem's contract of an engine: the same tokens as vLLM alone, and every request ends with its blocks back."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.request import Request
from tandem.engine.vllm.wing import make
from tandem.wire.adapters import identity_of
from tandem.wire.kv_events import BlockStored
from tandem.wire.requests import RequestFacts, TokenChunk
from tandem.wire.sampling import FinishReason, RepetitionDetection, SamplingParams
from tests.vllm.conftest import ARGS, CONTEXT, answers_alone, prompt, write_adapter, write_model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="this Python has no vLLM: `make test-vllm` runs these in one that has",
    ),
    pytest.mark.timeout(600),
]


def request(name: str, tokens: list[int], *, brought: Sequence[int] = (), eos: frozenset[int] = frozenset(), salt: str | None = None, lora: str | None = None, **sampling: Any) -> Request:  # fmt: skip
    asked = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    facts = RequestFacts(prompt_token_ids=tokens, sampling=asked, cache_salt=salt, lora=lora)
    return Request(name, facts, output_token_ids=brought, eos_token_ids=eos)


def run(engine: Any, *requests: Request, most: int = 5000) -> dict[str, list[TokenChunk]]:
    for each in requests:
        engine.add_request(each)
    left = {each.request_id for each in requests}
    found: defaultdict[str, list[TokenChunk]] = defaultdict(list)
    for _ in range(most):
        for chunk in engine.step().updates:
            found[chunk.request_id].append(chunk)
            if chunk.finish is not None:
                left.discard(chunk.request_id)
        if not left:
            return found
    raise AssertionError(f"{sorted(left)} did not end")


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.start == len(tokens) + chunks[0].start
        tokens += chunk.token_ids
    return tokens


def is_at_rest(engine: Any) -> bool:
    while engine.step().progressed:
        pass
    stats = engine.stats()
    return bool(stats.running == stats.waiting == 0 and stats.free_blocks == stats.total_blocks)


LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 511, 512, 513, 700, 900, 1200, 1600, 2200, 3000]  # fmt: skip


def test_its_greedy_answers_are_those_of_vllm_alone(engine: Any, tiny_model: Any) -> None:
    prompts = [prompt(length, seed) for seed in (1, 2) for length in LENGTHS]
    expected = answers_alone(tiny_model, prompts, 12)
    found = run(engine, *(request(f"r{i}", tokens, max_tokens=12, ignore_eos=True) for i, tokens in enumerate(prompts)))
    assert [tokens_of(found[f"r{i}"]) for i in range(len(prompts))] == expected
    assert all(chunks[-1].finish is FinishReason.LENGTH for chunks in found.values())
    assert is_at_rest(engine)


def test_a_prefix_is_found_again_and_changes_no_answer(engine: Any) -> None:
    engine.reset_prefix_cache()
    first = run(engine, request("a", prompt(300, 9)))["a"]
    again = run(engine, request("b", prompt(300, 9)))["b"]
    assert tokens_of(first) == tokens_of(again)
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 288)
    engine.reset_prefix_cache()
    assert run(engine, request("c", prompt(300, 9)))["c"][0].cached_tokens == 0


def test_a_salt_keeps_its_prefixes_apart(engine: Any) -> None:
    engine.reset_prefix_cache()
    run(engine, request("a", prompt(300, 10), salt="one"))
    assert run(engine, request("b", prompt(300, 10), salt="two"))["b"][0].cached_tokens == 0
    assert run(engine, request("c", prompt(300, 10), salt="one"))["c"][0].cached_tokens == 288


def test_a_reset_under_a_running_request_changes_no_answer(engine: Any) -> None:
    expected = tokens_of(run(engine, request("a", prompt(200, 11), max_tokens=20, ignore_eos=True))["a"])
    engine.add_request(request("b", prompt(200, 11), max_tokens=20, ignore_eos=True))
    found: list[TokenChunk] = []
    while len(found) < 5:
        found += engine.step().updates
    engine.reset_prefix_cache()
    while found[-1].finish is None:
        found += engine.step().updates
    assert tokens_of(found) == expected
    assert found[-1].preemptions == 1
    assert is_at_rest(engine)


def test_a_request_goes_on_with_the_tokens_that_it_brings(engine: Any) -> None:
    whole = tokens_of(run(engine, request("a", prompt(150, 3), max_tokens=16, ignore_eos=True))["a"])
    chunks = run(engine, request("b", prompt(150, 3), brought=whole[:6], max_tokens=16, ignore_eos=True))["b"]
    assert chunks[0].start == 6
    assert tokens_of(chunks) == whole[6:]


def test_it_ends_in_every_phase_and_gives_its_blocks_back(engine: Any) -> None:
    for phase in ("waiting", "in its prompt", "writing"):
        engine.add_request(request(phase, prompt(900, 4), max_tokens=400, ignore_eos=True))
        if phase != "waiting":
            engine.step()
        if phase == "writing":
            while not engine.step().updates:
                pass
        engine.abort_requests([phase, "never heard of"])
        assert is_at_rest(engine), phase
    assert engine.stats().requests_finished["abort"] >= 3


def test_a_stop_token_ends_the_answer_and_is_named(engine: Any) -> None:
    whole = tokens_of(run(engine, request("a", prompt(80, 5), max_tokens=12, ignore_eos=True))["a"])
    stop = next(token for i, token in enumerate(whole) if i >= 3 and token not in whole[:i])
    chunks = run(engine, request("b", prompt(80, 5), max_tokens=12, stop_token_ids=[stop]))["b"]
    assert tokens_of(chunks) == whole[: whole.index(stop) + 1]
    assert (chunks[-1].finish, chunks[-1].stop_token) == (FinishReason.STOP, stop)
    as_eos = run(engine, request("c", prompt(80, 5), eos=frozenset([stop]), max_tokens=12))["c"]
    assert tokens_of(as_eos) == tokens_of(chunks)
    goes_on = run(engine, request("d", prompt(80, 5), eos=frozenset([stop]), max_tokens=12, ignore_eos=True))
    assert tokens_of(goes_on["d"]) == whole


def test_logprobs_come_with_every_token(engine: Any) -> None:
    chunks = run(engine, request("a", prompt(40, 6), logprobs=3, prompt_logprobs=2))["a"]
    found = [entry for chunk in chunks for entry in chunk.logprobs or []]
    assert [entry.token_id for entry in found] == tokens_of(chunks)
    assert all(entry.rank == 1 and len(entry.top) == 3 for entry in found)
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in found)
    assert all(sum(math.exp(value) for _, value in entry.top) <= 1.0001 for entry in found)
    of_prompt = chunks[0].prompt_logprobs
    assert of_prompt is not None
    assert (of_prompt[0], len(of_prompt)) == (None, 40)
    assert [entry.token_id for entry in of_prompt[1:] if entry is not None] == prompt(40, 6)[1:]


def test_a_seed_gives_the_same_answer_again(engine: Any) -> None:
    found = run(
        engine,
        *(request(name, prompt(50, 7), temperature=1.5, seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))),
    )
    assert tokens_of(found["a"]) == tokens_of(found["b"]) != tokens_of(found["c"])


def test_a_sampled_answer_goes_on_where_it_was_with_its_noise(engine: Any) -> None:
    sampled = {"temperature": 1.2, "seed": 9, "max_tokens": 20, "ignore_eos": True, "top_p": 0.95}
    whole = tokens_of(run(engine, request("a", prompt(600, 7), **sampled))["a"])
    assert tokens_of(run(engine, request("b", prompt(600, 7), brought=whole[:8], **sampled))["b"]) == whole[8:]
    company = [request(f"c{i}", prompt(300 + i, i), temperature=1.0, seed=i) for i in range(6)]
    assert tokens_of(run(engine, request("d", prompt(600, 7), **sampled), *company)["d"]) == whole


def test_an_answer_follows_its_grammar_also_after_a_move(engine: Any) -> None:
    grammar = 'start: "abc" "def" "ghi"'
    chunks = run(engine, request("a", prompt(30, 8), eos=frozenset([1]), max_tokens=30, grammar=grammar))["a"]
    whole = tokens_of(chunks)
    assert (chunks[-1].finish, chunks[-1].stop_token) == (FinishReason.STOP, 1)
    moved = run(
        engine, request("b", prompt(30, 8), brought=whole[:4], eos=frozenset([1]), max_tokens=30, grammar=grammar)
    )["b"]
    assert tokens_of(moved) == whole[4:]


def test_a_grammar_that_is_none_fails_its_request_alone(engine: Any) -> None:
    found = run(
        engine, request("bad", prompt(30, 8), grammar="start: nothing_of_that_name"), request("good", prompt(30, 8))
    )
    assert found["bad"][-1].error is not None
    assert found["bad"][-1].error.code == "invalid_request"
    assert found["good"][-1].finish is FinishReason.LENGTH
    assert is_at_rest(engine)


def test_a_long_chain_of_references_ends_no_node(engine: Any) -> None:
    """vLLM's library follows rules on the stack."""
    rules = [f'r{at}: "a" r{at + 1}' for at in range(4000)]
    run(engine, request("deep", prompt(30, 8), max_tokens=2, grammar="\n".join([*rules, 'r4000: "b"', "start: r0"])))
    assert is_at_rest(engine)


def test_what_can_never_run_is_refused_with_the_reason(engine: Any) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT} tokens leave no room"):
        engine.add_request(request("a", prompt(CONTEXT)))
    with pytest.raises(InvalidRequest, match="vLLM does not take this request"):
        engine.add_request(request("b", prompt(5), presence_penalty=9.0))
    assert is_at_rest(engine)


def test_more_than_its_cache_holds_is_preempted_and_answered(engine: Any) -> None:
    requests = {f"p{i}": prompt(1400, 20 + i) for i in range(12)}
    alone = {name: tokens_of(run(engine, request(name, tokens, max_tokens=60, ignore_eos=True))[name]) for name, tokens in list(requests.items())[:3]}  # fmt: skip
    engine.reset_prefix_cache()
    found = run(engine, *(request(name, tokens, max_tokens=60, ignore_eos=True) for name, tokens in requests.items()))
    assert {name: tokens_of(found[name]) for name in alone} == alone
    assert is_at_rest(engine)


def test_a_repetition_ends_the_answer(engine: Any) -> None:
    bias = {7: 100.0}
    wanted = RepetitionDetection(max_pattern_size=2, min_count=4)
    chunks = run(engine, request("a", prompt(20), max_tokens=50, logit_bias=bias, repetition_detection=wanted))["a"]
    assert tokens_of(chunks) == [7] * 4
    assert chunks[-1].finish is FinishReason.STOP


def test_its_cache_tells_what_it_stores(engine: Any) -> None:
    engine.reset_prefix_cache()
    engine.tell_cache_events()
    run(engine, request("a", prompt(100, 12), salt="s"))
    stored = [event for event in engine.take_cache_events() if isinstance(event, BlockStored)]
    assert stored[0].parent_block_hash is None
    assert [token for event in stored for token in event.token_ids] == prompt(100, 12)[:96]
    assert stored[0].block_size == 32
    assert (stored[0].extra_keys or [None])[0] == ("salt:s",)


DOWN_PROJ, O_PROJ = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"


def test_an_adapter_is_named_in_what_its_cache_tells(engine: Any, tmp_path: Path) -> None:
    book = engine.adapters
    folder = write_adapter(tmp_path / "law", {DOWN_PROJ: (256, 128), O_PROJ: (128, 128)})
    book.serve([book.read("law", folder)])
    identity = identity_of("law", book.served["law"])
    engine.reset_prefix_cache()
    engine.tell_cache_events()
    own = tokens_of(run(engine, request("a", prompt(100, 12)))["a"])
    engine.take_cache_events()
    chunks = run(engine, request("b", prompt(100, 12), salt="s", lora=identity))["b"]
    assert (chunks[0].cached_tokens, tokens_of(chunks) != own) == (0, True)
    stored = [event for event in engine.take_cache_events() if isinstance(event, BlockStored)]
    assert {event.lora_name for event in stored} == {identity}
    assert [keys for event in stored for keys in event.extra_keys or []][:2] == [
        (f"lora:{identity}", "salt:s"),
        (f"lora:{identity}",),
    ]
    company = [request(f"c{i}", prompt(100, 12), lora=(identity, None)[i % 2], max_tokens=20 + i) for i in range(6)]
    company.append(request("d", prompt(30, 2), lora=identity, prompt_logprobs=1))
    found = run(engine, *company)
    assert len(found["d"][0].prompt_logprobs or []) == 30
    assert all(tokens_of(found[f"c{i}"])[:8] == (tokens_of(chunks), own)[i % 2] for i in range(6))


def test_of_several_adapters_vllm_takes_all_or_none(engine: Any, tmp_path: Path) -> None:
    book = engine.adapters
    kept = write_adapter(tmp_path / "kept", {O_PROJ: (128, 128)})
    book.serve([book.read("kept", kept)])
    good = book.read("good", write_adapter(tmp_path / "good", {O_PROJ: (128, 128)}, seed=2))
    for layers, said in (
        ({DOWN_PROJ: (128, 128)}, f"its updates of {DOWN_PROJ} have another size"),
        ({O_PROJ: (128, 128), "model.layers.7.mlp.up_proj": (128, 256)}, "changes model.layers.7.mlp.up_proj, which"),
        ({"model.layers.0.mlp.no_such": (128, 128)}, "vLLM does not take it: While loading"),
    ):
        bad = book.read("bad", write_adapter(tmp_path / str(len(said)), layers))
        with pytest.raises(ConfigurationError, match=r"the adapter 'bad' .* cannot be served") as refused:
            book.serve([good, bad])
        assert said in str(refused.value)
        assert list(book.served) == ["kept"]
        assert not book.has(good.identity)
        good = book.read("good", tmp_path / "good")
    book.serve([good], ["kept"])
    asked = [request(name, prompt(60, 14), lora=identity_of(name, book.served[name])) for name in ("good", "kept")]
    found = run(engine, *asked)
    assert tokens_of(found["good"]) != tokens_of(found["kept"])
    book.serve([])
    book.forget_others(set(), 0.0)
    assert not book.has_others


def test_a_model_with_experts_is_refused_on_cpus_where_adapters_are_served(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    folder = write_model(tmp_path, Qwen3MoeForCausalLM, Qwen3MoeConfig, num_key_value_heads=2, head_dim=32, **shape)
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu", engine="vllm", engine_args=dict(ARGS))
    config = EngineConfig(model=model, cache=CacheConfig(memory_bytes=64 << 20), scheduler=SchedulerConfig(max_loras=1))
    with pytest.raises(ConfigurationError, match=r"computes experts with Triton .* set scheduler\.max_loras to 0"):
        make(config, model, lambda what, fraction: None, None)


def test_it_counts_what_it_does(engine: Any) -> None:
    before = engine.stats()
    run(engine, request("a", prompt(100, 13)))
    after = engine.stats()
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == 100
    assert after.output_tokens - before.output_tokens == 8
    assert after.requests_finished["length"] - before.requests_finished["length"] == 1
    assert after.decode_steps - before.decode_steps == 7
