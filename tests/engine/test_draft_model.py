"""A draft model: the tokens are the same as without it, whatever happens to the requests' blocks. And a model that drafts for itself is
always right, so the draft model's KV is never that of another text."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tandem.base.errors import ConfigurationError
from tandem.engine.config import AsyncScheduling, CacheConfig, ModelConfig, Reserve, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.state import SchedulerStats
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more

GUESSES = 3
NEW_TOKENS = 14
_numbers = random.Random(5)
PROMPTS = {f"r{i}": [_numbers.randrange(3, tiny.VOCAB) for _ in range(5 + 9 * i)] for i in range(4)}
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
Alone = dict[str, dict[str, list[int]]]
"""The answers without drafts."""
SEEDED = msgspec.structs.replace(GREEDY, temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sister(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with nearly the same weights, whose drafts are sometimes right."""
    path = tmp_path_factory.mktemp("draft") / "sister"
    model = AutoModelForCausalLM.from_pretrained(llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft(sister: Path) -> Path:
    return sister


def start(
    model: Path,
    draft: Path | str = "",
    transfer: TransferConfig | None = None,
    name: str = "n",
    *,
    guesses: int = GUESSES,
    num_blocks: int | None = None,
    caching: bool = False,
    ahead: AsyncScheduling = AsyncScheduling.NEVER,
) -> OneEngine:
    scheduler = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, num_speculative_tokens=guesses, max_draft_loss=1.0,
        async_scheduling=ahead, reserve=Reserve.NONE if num_blocks else Reserve.PROMPT
    )  # fmt: skip
    cache: dict[str, Any] = {"memory_bytes": 4 << 20, "prefix_caching": caching, "num_blocks": num_blocks}
    return OneEngine.start(model, name, 4, transfer, scheduler=scheduler, draft=draft, **cache)


def answers(engine: OneEngine, sampling: SamplingParams = GREEDY) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, NEW_TOKENS, None, sampling=sampling)
    return engine.run_all()


def stats(engine: OneEngine) -> SchedulerStats:
    return engine.engine.scheduler.stats()


def without_drafts(model: Path) -> Alone:
    engine = start(model, guesses=0)
    return {"greedy": answers(engine), "seeded": answers(engine, SEEDED)}


@pytest.fixture(scope="module")
def alone(llama: Path) -> Alone:
    return without_drafts(llama)


@pytest.mark.parametrize("native", [True, False], ids=["native", "general"])
def test_a_model_is_always_right_about_itself(llama: Path, native: bool) -> None:
    driver = Driver(driven(llama, llama, native))
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    assert run_and_count(driver, NEW_TOKENS) > 0
    expected = [answer.tokens for answer in tiny.reference(llama, list(PROMPTS.values()), NEW_TOKENS)]
    assert [request.output[:NEW_TOKENS] for request in driver.requests.values()] == expected


in_both_orders = pytest.mark.parametrize(
    ("sampling", "ahead"),
    [
        (GREEDY, AsyncScheduling.ALWAYS),
        (SEEDED, AsyncScheduling.NEVER),
        *more([(GREEDY, AsyncScheduling.NEVER), (SEEDED, AsyncScheduling.ALWAYS)]),
    ],
)


def expect_the_same(engine: OneEngine, sampling: SamplingParams, alone: Alone) -> SchedulerStats:
    """Some drafts are right, some are wrong, and no token is another than without drafts."""
    assert answers(engine, sampling) == alone["seeded" if sampling is SEEDED else "greedy"]
    found = stats(engine)
    assert 0 < found.speculative_accepted < found.speculative_drafted
    return found


@in_both_orders
def test_it_changes_no_token(
    llama: Path, draft: Path, alone: Alone, sampling: SamplingParams, ahead: AsyncScheduling
) -> None:
    expect_the_same(start(llama, draft, ahead=ahead), sampling, alone)


@pytest.mark.parametrize("sampling", [SEEDED, *more([GREEDY])])
def test_with_preemptions_and_a_shared_cache(llama: Path, draft: Path, alone: Alone, sampling: SamplingParams) -> None:
    engine = start(llama, draft, num_blocks=20, caching=True)
    for _ in range(2):
        found = expect_the_same(engine, sampling, alone)
    assert found.preemptions


def test_what_a_prefix_hit_brings_is_not_read_again(llama: Path) -> None:
    engine = start(llama, llama, caching=True)
    model = engine.engine.runner.drafter  # type: ignore[attr-defined]
    prompt = list(range(3, 43))
    said = engine.answer("first", prompt, NEW_TOKENS)
    read = model.num_read
    assert read >= len(prompt)
    assert engine.answer("second", prompt, NEW_TOKENS) == said
    assert model.num_read - read < 4 + NEW_TOKENS  # a block of the prompt, and what was guessed last
    found = stats(engine)
    assert found.speculative_accepted == found.speculative_drafted > 0


def test_after_a_handover_the_prompt_is_read_where_the_answer_is_made(llama: Path) -> None:
    transfer = TransferConfig(checksums=True)
    with start(llama, "", transfer, "p", guesses=0) as producer, start(llama, llama, transfer, "c") as consumer:
        prompt = PROMPTS["r3"]
        expected = tiny.reference(llama, [prompt], NEW_TOKENS)[0].tokens
        # Another text was in the same blocks before.
        consumer.answer("before", PROMPTS["r2"], NEW_TOKENS)
        assert hand_over(producer, consumer, "r", prompt, NEW_TOKENS) == expected
        found = stats(consumer)
        assert found.speculative_accepted == found.speculative_drafted > NEW_TOKENS
        model = consumer.engine.runner.drafter  # type: ignore[attr-defined]
        assert model.num_read >= len(PROMPTS["r2"]) + len(prompt)


def test_aborts_leave_nothing_behind(llama: Path, alone: Alone) -> None:
    engine = start(llama, llama, num_blocks=60)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, NEW_TOKENS, None)
    for _ in range(6):
        engine.engine.step()
    engine.engine.abort_requests(["r0", "r2"])
    engine.run_all()
    assert stats(engine).free_blocks == stats(engine).total_blocks
    assert answers(engine) == alone["greedy"]
    found = stats(engine)
    # What was guessed for the two that ended was not settled.
    assert found.speculative_accepted == found.speculative_drafted > 0


def driven(model: Path, draft: Path | str, native: bool = True) -> TorchRunner:
    return load(
        model, draft=str(draft), max_num_seqs=8, max_model_len=128, num_speculative_tokens=GUESSES, native=native
    )


def run_and_count(driver: Driver, num_tokens: int) -> int:
    """Runs the requests, and returns how many drafts were checked; none may be wrong."""
    checked = driver.num_accepted
    proposed = 0
    while unfinished := [each for each in driver.requests.values() if len(each.output) < num_tokens]:
        proposed += sum(len(driver.drafts.get(each.req_id, ())) for each in unfinished)
        driver.step({each.req_id: each.pending for each in unfinished})
    assert driver.num_accepted - checked == proposed
    return proposed


def expect_guesses(driver: Driver, reference: Any, piece: int) -> None:
    """Each guess is the reference's, which reads the whole text at once, in whatever pieces and batches the text is computed."""
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    numbers, compared = random.Random(7), 0
    while unfinished := [each for each in driver.requests.values() if len(each.output) < NEW_TOKENS]:
        some = [each for each in unfinished if numbers.random() < 0.7] or unfinished
        # Sometimes what was guessed is not checked, and the text goes on without.
        driver.step({each.req_id: min(each.pending, piece) for each in some}, guesses=numbers.random() < 0.7)
        for req_id, drafts in driver.last.draft_token_ids.items():
            assert drafts == reference.after(driver.requests[req_id].tokens, len(drafts))
            compared += 1
    assert compared > 20


@dataclasses.dataclass
class Guessing:
    """A runner with a draft model, and what that model would say to a text of which it has read all at once."""

    runner: TorchRunner
    plain: TorchRunner
    model: torch.nn.Module
    seen: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    def after(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            key = tuple(tokens)
            if key not in self.seen:
                with torch.inference_mode():
                    self.seen[key] = int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens = [*tokens, self.seen[key]]
        return tokens[-count:]


@pytest.fixture(scope="module")
def guessing(llama: Path, sister: Path) -> Guessing:
    model = AutoModelForCausalLM.from_pretrained(sister, dtype=torch.float32).eval()
    return Guessing(driven(llama, sister), driven(llama, ""), model)


TEXTS = [list(range(start, start + length)) for start, length in ((3, 11), (3, 5), (40, 11), (60, 2))]
EVENTS = ["add", "arrive", "share", "preempt", "finish", "run", "run"]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from(EVENTS), max_size=14))
@example(0, ["run", "finish", "add", "run", "finish", "arrive", "run"])
def test_blocks_that_change_hands_are_read_for_who_has_them(guessing: Guessing, seed: int, events: list[str]) -> None:
    for runner in (guessing.runner, guessing.plain):
        runner.forget_requests()
    driver, elsewhere, numbers = Driver(guessing.runner, seed), Driver(guessing.plain), random.Random(seed)
    driver.free = driver.free[:30]  # so that few blocks see many texts
    for index, event in enumerate(["add", "run", *events]):
        names, name = list(driver.requests), f"r{index}"
        if event in ("add", "arrive", "share") and len(names) == 3:
            event = "run"
        if event == "add":
            driver.add(name, numbers.choice(TEXTS))
        elif event == "arrive":
            elsewhere.add(name, numbers.choice(TEXTS))
            elsewhere.step({name: elsewhere.requests[name].pending})
            driver.adopt(name, elsewhere)
        elif event == "share" and names:
            other = driver.requests[numbers.choice(names)]
            shared = min(other.computed, 16) // 4 * 4
            driver.add(name, [*other.tokens[:shared], 70, 71], prefix_of=other.req_id, shared_tokens=shared)
        elif event == "preempt" and names:
            driver.preempt(numbers.choice(names))
        elif event == "finish" and names:
            driver.finish(numbers.choice(names))
        elif event == "run":
            for _ in range(numbers.randrange(1, 4)):
                work = {each.req_id: each.pending for each in driver.requests.values() if len(each.output) < 8}
                driver.step(work, guesses=numbers.random() < 0.7)
                for req_id, drafts in driver.last.draft_token_ids.items():
                    assert drafts == guessing.after(driver.requests[req_id].tokens, len(drafts))
    for name in list(driver.requests):
        driver.finish(name)
    driver.step({})


def test_what_was_written_to_holds_nothing_of_before(guessing: Guessing) -> None:
    """A text comes back, computed elsewhere, to the block that held it, in which another one began meanwhile."""
    for runner in (guessing.runner, guessing.plain):
        runner.forget_requests()
    driver, elsewhere = Driver(guessing.runner), Driver(guessing.plain)
    blocks = driver.free = driver.free[:6]
    before, between = list(range(3, 12)), TEXTS[3]
    order = list(blocks)
    for name, prompt in (("first", before), ("other", between)):
        driver.free[:] = order
        driver.add(name, prompt)
        driver.step({name: len(prompt)})
        assert driver.drafts[name]
        driver.finish(name)
        driver.step({})
    driver.free[:] = order
    elsewhere.add("again", before)
    elsewhere.step({"again": len(before)})
    driver.adopt("again", elsewhere)
    driver.step({"again": 1})
    tokens, drafts = driver.requests["again"].tokens, driver.drafts["again"]
    assert drafts == guessing.after(tokens, len(drafts))


def test_its_keys_and_values_count_to_the_caches_memory(llama: Path) -> None:
    cache = CacheConfig(block_size=4, memory_bytes=1 << 20)
    scheduler = SchedulerConfig(max_num_seqs=256, num_speculative_tokens=GUESSES)

    def blocks(draft: str) -> int:
        model = ModelConfig(path=str(llama), dtype="float32", threads=1, draft=draft)
        return load_runner(model, cache, scheduler).info.num_blocks

    assert blocks(str(llama)) == blocks("") // 2


def refused(model: Path, draft: Path | str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        start(model, draft)
    return str(caught.value)


def with_words(path: Path, folder: Path, words: list[str]) -> Path:
    copied = folder / "-".join(words)
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(copied)
    vocab = {word: number for number, word in enumerate(words)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=words[0])).save(str(copied / "tokenizer.json"))
    return copied


def test_another_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    ours = with_words(llama, tmp_path, ["a", "b", "c"])
    said = refused(ours, with_words(llama, tmp_path, ["a", "c", "b"]))
    assert "whose token 1 is 'c'" in said
    assert "a draft model needs the same tokenizer" in said
    said = refused(ours, with_words(llama, tmp_path, ["a", "b"]))
    assert "which has 2 tokens, and a-b-c has 3" in said
    start(ours, ours)


def test_what_cannot_guess_is_refused(llama: Path, tmp_path: Path) -> None:
    window = tiny.save("mistral-window", tmp_path)
    assert "not all of whose layers attend to every token" in refused(llama, window)
    assert "not all of whose layers attend to every token" in refused(llama, tiny.save("mamba", tmp_path))
    assert "none of its layers keeps every token" in refused(window, llama)
    head = tmp_path / "head"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "architectures": ["Eagle3LlamaForCausalLM"]}))
    assert "whose class is Eagle3LlamaForCausalLM" in refused(llama, head)
    assert "there is no model at" in refused(llama, tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["qwen3.5", "gemma3"])
def test_it_guesses_beside_recurrent_states_and_windows(kind: str, tmp_path: Path) -> None:
    """Of windows' tables it reads the one that keeps all."""
    path, draft = tiny.save(kind, tmp_path), tiny.save("llama", tmp_path)
    expected = start(path, guesses=0).answer("r", PROMPTS["r3"], NEW_TOKENS)
    engine = start(path, draft)
    assert engine.answer("r", PROMPTS["r3"], NEW_TOKENS) == expected
    assert stats(engine).speculative_drafted
