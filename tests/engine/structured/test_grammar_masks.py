"""Constrained answers: right for every schema, and the same however they came about.

The slow ones write dozens of whole answers, token by token.
"""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from tandem.base.errors import InternalError, InvalidRequest
from tandem.engine.structured.grammars import MOST_BEYOND_S, SHARE_S, TokenizerGrammars
from tandem.wire.sampling import SamplingParams
from tests.engine.structured.grammar_walks import (
    END,
    PROMPT,
    Model,
    backend,
    costly_after,
    decode,
    encode,
    grammars,
    logits_at,
    vocabulary,
)
from tests.engine.structured.schema_strategies import Schema, schemas

replace = msgspec.structs.replace


def grammar_of(schema: Schema) -> str:
    return f"start: %json {json.dumps(schema)}"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.3, seed=4, top_k=20, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=5, top_p=0.7, frequency_penalty=0.8, logit_bias={END: 5.0}),
]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(schema=schemas, seed=st.integers(0, 1000), which=st.sampled_from(range(len(SAMPLINGS))))
def test_an_answer_is_an_instance_of_its_schema(schema: Schema, seed: int, which: int) -> None:
    params = replace(SAMPLINGS[which], grammar=grammar_of(schema))
    value = json.loads(Model(params, seed).finish())
    jsonschema.validate(value, schema)


@pytest.mark.slow
@pytest.mark.parametrize("params", SAMPLINGS)
def test_an_answer_that_moves_goes_on_as_if_it_had_not(params: SamplingParams) -> None:
    """A handoff, a preemption and a failover are all this: another node has the tokens so far, and nothing more."""
    params = replace(params, grammar=grammar_of(PERSON))
    whole = Model(params)
    whole.finish()
    for moved_after in range(1, len(whole.output), 8):
        elsewhere = Model(params, output=whole.output[:moved_after])
        elsewhere.finish()
        assert elsewhere.output == whole.output


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), which=st.sampled_from(range(len(SAMPLINGS))))
def test_drafts_change_nothing(seed: int, which: int) -> None:
    """Right ones, wrong ones, ones that no grammar would allow, and ends that come too early."""
    params = replace(SAMPLINGS[which], grammar=grammar_of(PERSON))
    plain = Model(params, seed)
    plain.finish()
    rng = random.Random(seed)
    drafted = Model(params, seed)
    while len(drafted.output) < len(plain.output):
        at = len(drafted.output)
        drafts = plain.output[at : at + rng.randint(0, 4)]
        if drafts and rng.random() < 0.6:
            drafts[rng.randrange(len(drafts))] = rng.choice([END, rng.randrange(vocabulary())])
        drafted.sample(drafts)
        assert drafted.failure is None
    # Behind the end of the answer nothing counts.
    assert drafted.output[: len(plain.output)] == plain.output


def test_rows_without_a_grammar_are_left_alone() -> None:
    model = Model(SamplingParams(temperature=0, grammar='start: "yes" | "no"'))
    model.requests.add("free", PROMPT, len(PROMPT), [[]])
    free = model.requests.row("free")
    model.table.set(free, SamplingParams(temperature=0))
    logits = torch.stack([logits_at(0, 3), logits_at(0, 3)])
    before = logits.clone()
    rows, positions = np.array([model.row, free]), np.array([3, 3])
    constrained, unconstrained = model.sampler.sample(logits, rows, positions, model.requests, model.table).tolist()
    assert unconstrained == int(logits[1].argmax())
    assert decode([constrained])[0] in "yn"
    assert torch.equal(logits, before)


def test_a_rows_next_request_knows_nothing_of_the_last() -> None:
    params = SamplingParams(temperature=0, grammar='start: "yes" | "no"')
    model = Model(params)
    first = model.finish()
    model.requests.remove("r")
    model.table.clear(model.row)
    model.masks.clear(model.row)
    assert model.requests.add("other", PROMPT, len(PROMPT), [[]]) == model.row
    model.table.set(model.row, params)
    assert model.finish() == first


@pytest.mark.parametrize(("grammar", "said"), [('start: "yes"', "yes"), ('start: "yes" | "no"', "no")])
def test_a_ban_is_kept_where_the_grammar_leaves_a_choice_and_only_there(grammar: str, said: str) -> None:
    """What it asks for has been banned, and something has to be said: it says what it asks for."""
    banned = [encode("y"), encode("yes")]
    assert Model(SamplingParams(temperature=0, grammar=grammar, bad_words=banned, min_tokens=5)).finish() == said


def test_tokens_that_do_not_follow_the_grammar_fail_the_request() -> None:
    """A peer or a router that sends them is broken: going on would make a wrong answer look right."""
    model = Model(SamplingParams(temperature=0, grammar=grammar_of(PERSON)), output=encode("hello"))
    model.sample()
    assert isinstance(model.failure, InternalError)
    assert "does not follow" in str(model.failure)


@pytest.mark.parametrize(
    ("answered", "drafts", "allowed"),
    [("", "yes", 3), ("", "yeah", 2), ("ye", "s", 1), ("ye", "no", 0), ("", "no", 0), ("maybe", "y", 0)],
)
def test_only_drafts_that_may_follow_are_made_and_asking_changes_nothing(
    answered: str, drafts: str, allowed: int
) -> None:
    model = Model(SamplingParams(temperature=0, grammar='start: "yes"'))
    tokens = [token for letter in answered for token in encode(letter)]
    model.requests.append_tokens(model.row, tokens)
    masks = model.masks
    guessed = [token for letter in drafts for token in encode(letter)]
    for _ in range(2):
        assert masks.num_allowed(model.row, guessed, model.requests, model.table) == allowed
    if answered != "maybe":
        assert model.finish() == "yes"


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    mask = grammars().empty_masks(1)[0]
    grammars().begin("start: /(.|\\n)*/").fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[: vocabulary() - 3].sum() > 200
    assert bits[vocabulary() - 3 :].sum() == 0


def test_a_grammar_that_costs_more_than_it_may_is_refused_where_it_does() -> None:
    """A text has more readings the longer it gets: the cost of a token grows with the tokens before it."""
    strict = TokenizerGrammars(
        backend().to_str, vocabulary(), frozenset({END}), limits=LLParserLimits(step_max_items=100)
    )
    position = strict.begin('start: x\nx: x x | "a"')
    mask = strict.empty_masks(1)[0]
    position.fill(mask)

    def go_on() -> None:
        for _ in range(100):
            position.follow(encode("a"))
            position.fill(mask)

    with pytest.raises(InvalidRequest, match="grammar failed"):
        go_on()
    assert position.num_tokens > 3


@pytest.mark.parametrize(("token_s", "is_refused"), [(SHARE_S, False), (3 * SHARE_S, True)])
def test_a_grammar_that_takes_too_much_time_fails_its_request_alone(token_s: float, *, is_refused: bool) -> None:
    """The number of its items says little: each of them may meet all others."""
    now = itertools.count()
    timed = TokenizerGrammars(backend().to_str, vocabulary(), frozenset({END}), cpu_time=lambda: next(now) * token_s)
    position, mask = timed.begin("start: /a*/"), timed.empty_masks(1)[0]

    def go_on() -> None:
        for _ in range(int(MOST_BEYOND_S / SHARE_S)):
            position.fill(mask)
            position.follow(encode("a"))

    if is_refused:
        with pytest.raises(InvalidRequest, match="too much time"):
            go_on()
    else:
        go_on()
    timed.begin("start: /a*/").fill(mask)


COSTLY = costly_after("xqxqxqxqxqxq")
SAYS_YES = SamplingParams(temperature=0, grammar=COSTLY, logit_bias={encode("y")[0]: 100.0})


def test_drafts_that_cost_too_much_to_follow_fail_no_answer() -> None:
    guessed = Model(SAYS_YES)
    drafts = encode("xqxqxqxqxqxqa1c")
    assert guessed.masks.num_allowed(guessed.row, drafts, guessed.requests, guessed.table) == 0
    assert guessed.finish() == "yes"
    verified = Model(SAYS_YES)
    verified.sample(drafts)
    assert verified.finish() == "yes"


def test_no_token_follows_drafts_that_cost_too_much() -> None:
    params = replace(SAYS_YES, logit_bias={}, bad_words=[encode("y")])
    model, drafts = Model(params), encode("xqxqxqxqxqxq")
    *chosen, last = model.sample(drafts)
    assert chosen
    assert (chosen, last, model.failure) == (drafts[: len(chosen)], -1, None)


def test_a_grammar_that_breaks_while_it_is_followed_is_the_clients_own() -> None:
    """That a text is not allowed is an answer. A matcher that gives up has no answer, which is an error."""
    position = grammars().begin("start: /(a?){1000}a{1000}/")
    assert position.follow(encode("b")) == 0
    with pytest.raises(InvalidRequest, match="grammar failed"):
        position.follow(encode("aaaa"))


@pytest.mark.parametrize("grammar", ["start: a\na: b\nb: a", 'start: %json {"$ref": "#"}'])
def test_a_grammar_without_an_end_is_told_in_words(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="no text can follow it"):
        grammars().begin(grammar)


def test_a_schema_as_large_as_people_write_them_is_within_the_limits() -> None:
    part = {"type": "object", "properties": {f"field_{i}": {"type": "string", "maxLength": 3} for i in range(20)}}
    schema: Schema = {
        "type": "object",
        "properties": {f"part_{i}": part for i in range(30)},
        "required": ["part_0", "part_29"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=1.0, seed=2, grammar=grammar_of(schema))
    jsonschema.validate(json.loads(Model(params).finish()), schema)


def test_a_chain_of_rules_is_compiled_however_long() -> None:
    """It ended the node's process: the library follows each reference on the stack."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(4000)]
    position = grammars().begin("\n".join([*rules, 'r4000: "b"', "start: r0"]))
    for _ in range(50):
        position.fill(grammars().empty_masks(1)[0])
        assert position.follow(encode("a")) == 1


def test_a_compiled_grammar_stays_while_anyone_has_it() -> None:
    made = TokenizerGrammars(backend().to_str, vocabulary(), frozenset({END}))
    made.prepare('start: "a"')
    kept = made.prepared('start: "a"')
    assert kept is not None
    for number in range(300):
        made.prepare(f'start: "{number}"')
    assert made.prepared('start: "a"') is kept
    assert made.prepared('start: "0"') is None
    del kept
    assert made.prepared('start: "a"') is None
