"""Tokens that a grammar forces are checked several at a time: the answer is the same, in fewer steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.base.errors import InvalidRequest
from tandem.engine.config import SchedulerConfig
from tandem.engine.model import torch_runner
from tandem.engine.structured import masks
from tandem.engine.structured.masks import MOST_IN_VAIN, MOST_SLOW
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.engine.structured.grammar_walks import PROMPT, Model, backend, costly_after, decode, encode
from tests.integration.one_engine import OneEngine

PERSON = {
    "first_name": {"type": "string", "maxLength": 12},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
    "email_address": {"type": "string", "maxLength": 16},
    "is_a_registered_customer": {"type": "boolean"},
}
ORDER = {
    "order_number": {"type": "integer", "minimum": 0, "maximum": 99999},
    "delivery_address": {
        "type": "object",
        "properties": {"street_and_number": {"type": "string", "maxLength": 20}, "postal_code": {"type": "string", "maxLength": 6}},
        "required": ["street_and_number", "postal_code"],
        "additionalProperties": False,
    },
    "payment_method": {"enum": ["credit_card", "bank_transfer"]},
}  # fmt: skip


def grammar_of(properties: dict[str, Any]) -> str:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return f"start: %json {json.dumps({**schema, 'additionalProperties': False})}"


@pytest.mark.parametrize(
    ("answered", "forced"), [("", ""), ("ye", "s"), ("n", "othing at all"), ("no", "thing at all")]
)
def test_what_leaves_no_choice_is_forced(answered: str, forced: str) -> None:
    model = Model(SamplingParams(temperature=0, grammar='start: "yes" | "nothing at all"'))
    model.requests.append_tokens(model.row, [token for letter in answered for token in encode(letter)])
    for most in (99, 1):
        found = model.masks.forced(model.row, most, model.requests, model.table)
        assert len(found) <= most
        assert forced.startswith(decode(found))
        assert bool(found) == bool(forced)
    assert model.finish() == answered + forced if forced else True


def test_a_model_that_cuts_words_in_its_own_way_is_left_alone() -> None:
    said = "true true true true"
    model = Model(SamplingParams(temperature=0, grammar=f'start: "{said}"'))
    forced = []
    for letter in said[:12]:
        found = model.masks.forced(model.row, 8, model.requests, model.table)
        forced.append(len(decode(found[:1])) > 1)  # a longer word than the letter that is chosen
        model.requests.append_tokens(model.row, encode(letter))
    assert forced.count(True) == MOST_IN_VAIN
    assert model.finish() == said


def test_a_grammar_that_forces_a_very_long_text_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SLOW_S", 0.0)
    model = Model(SamplingParams(temperature=0, grammar="start: /a{5000}/"))
    found = []
    for _ in range(4):
        found.append(len(model.masks.forced(model.row, 8, model.requests, model.table)))
        model.sample()
    assert found == [8] * MOST_SLOW + [0] * (4 - MOST_SLOW)
    assert model.failure is None


def test_what_is_forced_up_to_a_place_that_costs_too_much_is_said_first(tmp_path: Path) -> None:
    """With drafts a step comes near that place earlier than without."""
    path = tiny.save("llama", tmp_path)
    backend().save(str(path / "tokenizer.json"))
    said = encode("xqxqxqxqxqxq")
    driver = Driver(load(path))
    driver.add("r", PROMPT, SamplingParams(temperature=0, grammar=costly_after(decode(said)), bad_words=[encode("y")]))
    assert driver.generate(len(said))["r"] == said
    driver.failing.add("r")
    assert isinstance(driver.step({"r": 1}).errors["r"], InvalidRequest)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("drafts", [0, 3])
def test_answers_are_the_same_in_fewer_steps(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    prompts = ["A customer as JSON:", "The order of a book, as JSON:"]
    answers, steps, forced = [], [], []
    for at_once in (torch_runner.FORCED_AT_ONCE, 0):
        monkeypatch.setattr(torch_runner, "FORCED_AT_ONCE", at_once)
        scheduler = SchedulerConfig(max_model_len=512, num_speculative_tokens=drafts)
        with OneEngine.start(smollm2_path, "e", 16, None, scheduler=scheduler) as engine:
            for number, temperature in enumerate((0.0, 0.0, 1.0, 1.0)):
                sampling = SamplingParams(
                    max_tokens=200, temperature=temperature, seed=number, stop_token_ids=[end],
                    grammar=grammar_of((PERSON, ORDER)[number % 2]),
                )  # fmt: skip
                prompt = tokenizer.encode(prompts[number % 2]).ids
                engine.add(str(number), prompt, 200, None, sampling=sampling)
            answers.append(engine.run_all())
            stats = engine.engine.scheduler.stats()
            steps.append(stats.steps)
            forced.append(stats.grammar_tokens_forced)
    assert answers[0] == answers[1]
    assert forced[0] > 20
    assert forced[1] == 0
    assert steps[0] < steps[1]
    print(f"steps {steps}, forced tokens {forced[0]} of {sum(map(len, answers[0].values()))}")
