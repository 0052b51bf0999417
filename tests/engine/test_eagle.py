"""An EAGLE head: the tokens are the same as without it, whatever happens to the requests' blocks; and its drafts are those of a head that
reads the whole text at once, in whatever chunks the text was computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine.model.speculation.eagle import EagleHead
from tandem.kvtransfer.config import TransferConfig
from tests.engine.eagle_files import ReferenceHead, ReferenceThirdHead, likely_words, save_head, save_third_head
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.engine.test_draft_model import (
    NEW_TOKENS,
    PROMPTS,
    Alone,
    driven,
    expect_guesses,
    refused,
    start,
    stats,
    without_drafts,
)
from tests.engine.test_draft_model import test_it_changes_no_token as test_it_changes_no_token
from tests.engine.test_draft_model import (
    test_with_preemptions_and_a_shared_cache as test_with_preemptions_and_a_shared_cache,
)
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return likely_words(tiny.save("llama", folder), folder)


@pytest.fixture(scope="module", params=["EAGLE-1", "EAGLE-3"])
def draft(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = save_head if request.param == "EAGLE-1" else save_third_head
    return save(llama, tmp_path_factory.mktemp("head"))


def reference_of(llama: Path, draft: Path) -> ReferenceHead | ReferenceThirdHead:
    return (ReferenceThirdHead if draft.name == "third" else ReferenceHead)(llama, draft)


@pytest.fixture(scope="module")
def alone(llama: Path) -> Alone:
    return without_drafts(llama)


def head_of(engine: OneEngine) -> EagleHead:
    found = engine.engine.runner.drafter  # type: ignore[attr-defined]
    assert isinstance(found, EagleHead)
    return found


@pytest.mark.parametrize(("native", "piece"), [(False, 3), *more([(True, 3), (True, 64), (False, 64)])])
def test_its_guesses_are_those_of_the_whole_text(llama: Path, draft: Path, native: bool, piece: int) -> None:
    driver = Driver(driven(llama, draft, native))
    expect_guesses(driver, reference_of(llama, draft), piece)
    assert driver.num_accepted


def test_a_prefix_gives_its_last_block_up_and_brings_the_rest_along(llama: Path, draft: Path) -> None:
    engine, plain = start(llama, draft, caching=True), start(llama, guesses=0, caching=True)
    text = [3 + 7 * place % 90 for place in range(41)]
    # The second is the first; the third leaves it after 22 tokens, in a block; the fourth where a block ends.
    texts = [text, text, [*text[:22], *range(20, 40)], [*text[:20], *range(40, 60)]]
    found: list[tuple[int, int]] = []
    for place, prompt in enumerate(texts):
        before = stats(engine).prompt_tokens_cached, stats(plain).prompt_tokens_cached
        said = plain.answer(str(place), prompt, NEW_TOKENS)
        assert engine.answer(str(place), prompt, NEW_TOKENS) == said
        found.append((stats(engine).prompt_tokens_cached - before[0], stats(plain).prompt_tokens_cached - before[1]))
    assert found == [(0, 0), (36, 40), (16, 20), (16, 20)]
    assert head_of(engine).num_cold == 0


def test_a_request_for_one_token_costs_nothing(llama: Path, draft: Path) -> None:
    """As a prefill node's are."""
    engine, plain = start(llama, draft, caching=True), start(llama, guesses=0, caching=True)
    for turn in range(2):
        for each in (engine, plain):
            each.add(f"long {turn}", PROMPTS["r1"], NEW_TOKENS, None)
            each.add(f"one {turn}", PROMPTS["r3"], 1, None)
        assert engine.run_all() == plain.run_all()
    assert head_of(engine).num_read <= 2 * (len(PROMPTS["r1"]) + NEW_TOKENS)
    given_up = 4  # by the longer request alone
    assert stats(engine).prompt_tokens_cached == stats(plain).prompt_tokens_cached - given_up


def test_after_a_handover_it_begins_at_the_next_block(llama: Path, draft: Path) -> None:
    transfer = TransferConfig(checksums=True)
    with start(llama, "", transfer, "p", guesses=0) as producer, start(llama, draft, transfer, "c") as consumer:
        prompt = PROMPTS["r3"]
        expected = tiny.reference(llama, [prompt], NEW_TOKENS)[0].tokens
        consumer.answer("before", PROMPTS["r2"], NEW_TOKENS)
        guessed = stats(consumer).speculative_drafted
        assert hand_over(producer, consumer, "r", prompt, NEW_TOKENS) == expected
        assert head_of(consumer).num_cold == 1
        assert stats(consumer).speculative_drafted > guessed


def test_what_it_guesses_after_a_handover_follows_from_what_it_has_seen(llama: Path, draft: Path) -> None:
    driver, elsewhere = Driver(driven(llama, draft)), Driver(driven(llama, ""))
    reference, prompt = reference_of(llama, draft), PROMPTS["r1"]
    elsewhere.add("r", prompt)
    elsewhere.step({"r": len(prompt)})
    driver.adopt("r", elsewhere)
    begin, compared = -(-len(prompt) // 4) * 4, 0
    while len(driver.requests["r"].output) < NEW_TOKENS:
        driver.step({"r": driver.requests["r"].pending})
        tokens, drafts = driver.requests["r"].tokens, driver.last.draft_token_ids.get("r", [])
        assert bool(drafts) == (len(tokens) - 1 > begin)
        if drafts:
            assert drafts == reference.after(tokens, len(drafts), begin)
            compared += 1
    assert compared > 3


def test_what_does_not_fit_is_refused(llama: Path, tmp_path: Path) -> None:
    other = save_head(llama, tmp_path / "size", hidden_size=48, num_attention_heads=4)
    assert "hidden states of 48 numbers, and likely has" in refused(llama, other)
    deeper = save_third_head(llama, tmp_path / "deeper", eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    assert "reads the layers [0, 1, 3] of a model that has 2" in refused(llama, deeper)
    before = save_third_head(llama, tmp_path / "before", norm_before_residual=True)
    assert "norm_before_residual" in refused(llama, before)
    wider = save_head(llama, tmp_path / "wider")
    config = (wider / "config.json").read_text().replace('"intermediate_size": 48', '"intermediate_size": 64')
    (wider / "config.json").write_text(config)
    assert "lacks model.layers.0.mlp" in refused(llama, wider)
    weights = wider / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "head cannot be loaded: " in refused(llama, wider)
