"""Fields that this server does not know, those that it has from other servers, and what holds when none is sent."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.api.field_table import ACCEPTED, INTERNAL, REFUSED
from tandem.api.openai.sampling import Defaults, defaults_of
from tandem.api.settings import SamplingDefaults
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import ConfigurationError
from tandem.router.config import RouterConfig
from tandem.router.http.request_fields import FIELDS
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tandem.wire.sampling import SamplingParams
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import VECTOR_SIZE
from tests.router.paths import of_served

EXTRAS = {"rid": "a", "request_id": "a", "provider": {"order": []}, "extra_body": {}, "num_ctx": 5, "typical_p": 1.0}


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    """A router that answers at every path."""
    return keep_router(vectors=VectorModel(Pooling(PoolingKind.LAST), VECTOR_SIZE))


def sampled(router: RunningRouter) -> SamplingParams:
    return router.nodes["p0"].submits[-1].sampling


def test_unknown_fields_are_ignored_and_named(router: RunningRouter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "router.access"):
        for answer in (router.complete(**EXTRAS, max_tokens=2), router.chat(**EXTRAS, max_tokens=2)):
            assert answer.status_code == 200
            assert answer.headers["x-tandem-ignored-fields"].split(",") == list(EXTRAS)
        assert "x-tandem-ignored-fields" not in router.complete(max_tokens=2).headers
        router.wait_for(lambda: len(caplog.messages) >= 3, "three lines")
    assert sum("ignored=rid,request_id," in line for line in caplog.messages) == 2


def test_a_name_that_no_header_may_hold_does_no_harm(router: RunningRouter) -> None:
    answer = router.complete(**{"a\r\nset-cookie: b": 1, "ü" * 2000: 1}, max_tokens=2)
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert len(answer.headers["x-tandem-ignored-fields"]) <= 1024


def test_internals_are_refused_whatever_they_hold(router: RunningRouter) -> None:
    for name in sorted(INTERNAL):
        for value in (None, {}, 1):
            assert error_of(router.complete(**{name: value}), 400)["param"] == name


def test_what_fits_a_request_at_once_has_no_field_that_is_to_be_looked_at() -> None:
    for kind in FIELDS.paths:
        assert kind.__struct_config__.forbid_unknown_fields
        assert INTERNAL.isdisjoint(kind.__struct_encode_fields__)


def test_the_model_need_not_be_named(start_router: StartRouter) -> None:
    router = start_router(model_aliases=("other",))
    for extra, shown in (({}, "fake"), ({"model": None}, "fake"), ({"model": "other"}, "other")):
        assert router.ask("/v1/chat/completions", messages=HI, max_tokens=2, **extra).json()["model"] == shown
    cards = router.client.get("/v1/models").json()["data"]
    assert ([card["id"] for card in cards], cards[0]["max_model_len"]) == (["fake", "other"], 2048)
    assert router.client.get("/v1/models/other").status_code == 200


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("guided_json", INTEGER, "%json"),
        ("guided_json", json.dumps(INTEGER), "%json"),
        ("guided_regex", "[ab]+", "start: /"),
        ("guided_choice", ["yes", "no"], 'start: "yes" | "no"'),
        ("guided_grammar", 'start: "x"', 'start: "x"'),
        ("regex", "[ab]+", "start: /"),
        ("json_schema", json.dumps(INTEGER), "%json"),
        ("ebnf", 'root ::= "yes" | "no"', '"yes"'),
        ("response_format", {"type": "json_object"}, "%json"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": INTEGER}}, '"integer"'),
    ],
)
def test_the_other_names_of_structured_outputs(router: RunningRouter, field: str, value: Any, grammar: str) -> None:
    for ask in (router.complete, router.chat):
        answer = ask(**{field: value}, max_tokens=2)
        assert answer.status_code == 200, answer.text
        assert grammar in (sampled(router).grammar or "")
    assert field in error_of(router.complete(**{field: value, "structured_outputs": {"regex": "a"}}), 400)["message"]


def test_a_grammar_that_is_none_is_refused(router: RunningRouter) -> None:
    for ebnf in ("nonsense", "root ::=  (", 'yes ::= "yes"', "root ::= " + "(" * 5_000):
        assert error_of(router.chat(ebnf=ebnf), 400)["param"] == "ebnf"


HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("kind", FIELDS.paths, ids=[one.path for one in FIELDS.paths.values()])
def test_a_field_that_would_change_the_answer_is_obeyed_or_refused(
    router: RunningRouter, kind: type[msgspec.Struct]
) -> None:
    """Every field that any path knows, at every path: none that matters is ignored with status 200."""
    here = FIELDS.paths[kind]

    def sent(name: str, value: Any) -> httpx.Response:
        return router.ask(here.path, **{**BODIES[here.path], name: value})

    assert router.ask(here.path, **BODIES[here.path]).status_code == 200
    own = set(kind.__struct_fields__)
    elsewhere = {name for other in FIELDS.generating for name in other.request.__struct_fields__ if here.generates}
    for name in sorted((elsewhere | set(REFUSED) | set(here.refused)) - own):
        if name in ACCEPTED or name in here.accepted:
            continue
        answer = sent(name, ["something else"])
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert error.get("param", error["message"]).startswith(name)
        assert sent(name, None).status_code == 200, name
    for name in sorted({*ACCEPTED, *here.accepted} - own):
        answer = sent(name, ["something else"])
        assert answer.status_code == 200, (name, answer.text)
        assert "x-tandem-ignored-fields" not in answer.headers
    answer = sent("unheard_of", 1)
    assert (answer.status_code, answer.headers["x-tandem-ignored-fields"]) == (200, "unheard_of")


@pytest.mark.parametrize(
    ("path", "fields", "instead"),
    of_served(
        ("/v1/chat/completions", {"best_of": 2}, "n gives several"),
        ("/v1/chat/completions", {"echo": True}, "continue_final_message"),
        ("/v1/chat/completions", {"extra_body": {"top_k": 5}}, "in the body itself"),
        ("/v1/chat/completions", {"nvext": {"top_k": 5}}, "in the body itself"),
        ("/v1/chat/completions", {"vllm_xargs": {"a": 1}}, "plugins"),
        ("/v1/chat/completions", {"lora_path": "sql"}, "no adapter of this server"),
        ("/v1/chat/completions", {"max_output_tokens": 5}, "use max_completion_tokens"),
        ("/v1/chat/completions", {"prompt": "x"}, "/v1/completions"),
        ("/v1/responses", {"response_format": {"type": "json_object"}}, "use text.format"),
        ("/v1/messages", {"stop": ["x"]}, "use stop_sequences"),
        ("/v1/embeddings", {"normalize": False}, "length 1"),
    ),
)
def test_a_refusal_says_what_is_right(router: RunningRouter, path: str, fields: dict[str, Any], instead: str) -> None:
    assert instead in error_of(router.ask(path, **BODIES[path] | fields), 400)["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    of_served(
        ("/v1/chat/completions", {"best_of": 1, "echo": False, "suffix": "", "vllm_xargs": {}}),
        ("/v1/completions", {"tools": [], "max_completion_tokens": 2, "typical_p": 1, "logits_processors": []}),
        ("/v1/messages", {"n": 1, "presence_penalty": 0, "seed": None}),
        ("/v1/embeddings", {"normalize": True, "embed_dtype": "float32"}),
    ),
)  # fmt: skip
def test_what_asks_for_what_is_so_anyway_is_taken(router: RunningRouter, path: str, fields: dict[str, Any]) -> None:
    answer = router.ask(path, **BODIES[path] | fields)
    assert answer.status_code == 200, answer.text


def test_the_special_tokens_that_a_template_lacks_can_be_asked_for(router: RunningRouter, tokenizer: Tokenizer) -> None:
    assert router.chat(max_tokens=2).status_code == 200
    plain = router.nodes["p0"].submits[-1].prompt_token_ids
    text = tokenizer.decode(plain)
    assert router.chat(max_tokens=2, add_special_tokens=True).status_code == 200
    assert router.nodes["p0"].submits[-1].prompt_token_ids == tokenizer.encode(text, special=True)


def test_tokens_can_be_shown_as_their_ids(router: RunningRouter) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 4}
    whole = router.complete(logprobs=1, **asked).json()["choices"][0]
    names = [f"token_id:{token}" for token in whole["token_ids"]]
    assert whole["logprobs"]["tokens"] == names
    assert [name in best for name, best in zip(names, whole["logprobs"]["top_logprobs"], strict=True)] == [True] * 4
    chat = router.chat(logprobs=True, top_logprobs=1, **asked).json()["choices"][0]
    shown = [one["token"] for one in chat["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in chat["token_ids"]]
    assert "token_id:" not in router.complete(logprobs=1, max_tokens=4).text


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    of_served(
        ("/v1/completions", {"max_tokens": "ten"}, "max_tokens: must be a whole number, not 'ten'"),
        ("/v1/completions", {"stop": ["x"] * 17}, "stop: must have at most 16 items, not 17"),
        ("/v1/completions", {"stop": ""}, "stop: must not be empty"),
        ("/v1/completions", {"temperature": 3}, "temperature: must be from 0 to 2, not 3"),
        ("/v1/completions", {"seed": 2**63}, f"seed: must be from {-(2**63)} to {2**63 - 1}, not {2**63}"),
        ("/v1/completions", {"top_p": 0}, "top_p: must be above 0 and at most 1, not 0"),
        ("/v1/completions", {"echo": "yes"}, "echo: must be true or false, not 'yes'"),
        ("/v1/completions", {"logit_bias": []}, "logit_bias: must be a mapping, not a list"),
        ("/v1/completions", {"logit_bias": {"5": "x"}}, "logit_bias: its values: must be a number"),
        ("/v1/completions", {"logit_bias": {"5": 500}}, "logit_bias: its values: must be from -100 to 100"),
        ("/v1/chat/completions", {"messages": []}, "messages: must have at least 1 item, not 0"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "usr", "content": "x"}]},
            "messages[0].role: must be one of assistant, developer, function, system, tool, user, not 'usr'; did you mean user?",
        ),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "HIGH"},
            "reasoning_effort: must match ^[a-z_]{1,20}$, not 'HIGH'",
        ),
        ("/v1/embeddings", {"dimensions": 0}, "dimensions: must be from 1 to 2147483647, not 0"),
        ("/tokenize", {"prompt": 5}, "prompt: must be text, not 5; put it in quotes"),
    ),
)
def test_a_mistake_is_told_in_plain_words(
    router: RunningRouter, path: str, fields: dict[str, Any], sentence: str
) -> None:
    assert error_of(router.ask(path, **BODIES[path] | fields), 400)["message"] == sentence


def test_only_these_tokens(router: RunningRouter, model_folder: str, end_token: int) -> None:
    backend = LLTokenizer((Path(model_folder) / "tokenizer.json").read_text(), eos_token=[end_token])

    def allows(text_ids: list[int]) -> tuple[bool, bool]:
        found = LLMatcher(backend, LLMatcher.grammar_from_lark(sampled(router).grammar or ""), log_level=0)
        return found.try_consume_tokens(text_ids) == len(text_ids), found.is_accepting()

    assert router.complete(allowed_token_ids=[70, 75], max_tokens=3).status_code == 200
    assert allows([70, 75]) == (True, False)
    assert allows([71]) == (False, False)
    assert router.complete(allowed_token_ids=[70, end_token], max_tokens=3).status_code == 200
    assert allows([70]) == (True, True)
    refused = router.complete(allowed_token_ids=[70], guided_regex="a")
    assert refused.json()["error"]["param"] == "allowed_token_ids"


def test_a_prompt_is_cut_to_its_end(router: RunningRouter, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox " * 2000  # far more than the context
    ids = tokenizer.encode(text, special=True)
    for keep, kept in ((5, ids[-5:]), (-1, ids[-(2048 - 7) :])):
        assert router.complete(prompt=text, truncate_prompt_tokens=keep, max_tokens=7).status_code == 200
        assert router.nodes["p0"].submits[-1].prompt_token_ids == kept
    assert router.chat(text, truncate_prompt_tokens=9, max_tokens=7).status_code == 200
    assert len(router.nodes["p0"].submits[-1].prompt_token_ids) == 9


def test_one_file_of_hidden_states_is_for_one_prompt_and_one_choice(router: RunningRouter) -> None:
    for asked in ({"prompt": ["a", "b"]}, {"n": 2}, {"best_of": 2}):
        assert error_of(router.complete(hidden_states="one", **asked), 400)["param"] == "hidden_states"


def test_token_ids_are_returned(router: RunningRouter, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the fox", special=True)
    whole = router.complete(return_token_ids=True, max_tokens=5, seed=3).json()["choices"][0]
    assert whole["prompt_token_ids"] == prompt
    assert tokenizer.decode(whole["token_ids"]) == whole["text"]
    with router.stream(return_token_ids=True, max_tokens=5, seed=3) as events:
        choices = [event["choices"][0] for event in events.rest() if event != "[DONE]"]
    assert choices[0]["prompt_token_ids"] == prompt
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    chat = router.chat(return_token_ids=True, max_tokens=5, seed=3).json()
    assert tokenizer.decode(chat["choices"][0]["token_ids"]) == chat["choices"][0]["message"]["content"]
    assert chat["prompt_token_ids"] == router.nodes["p0"].submits[-1].prompt_token_ids


def test_log_probabilities_of_the_prompt(router: RunningRouter, tokenizer: Tokenizer) -> None:
    for ask in (router.complete, router.chat):
        body = ask(prompt_logprobs=2, max_tokens=2).json()
        shown = body["choices"][0].get("prompt_logprobs") or body["prompt_logprobs"]
        ids = router.nodes["p0"].submits[-1].prompt_token_ids
        assert shown[0] is None
        for token_id, entry in zip(ids[1:], shown[1:], strict=True):
            assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
            assert len(entry) == 2
    refused = router.complete(prompt_logprobs=1, stream=True)
    assert refused.json()["error"]["param"] == "prompt_logprobs"


def folder_with(model_folder: str, tmp_path: Path, **declared: Any) -> str:
    for file in Path(model_folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(declared))
    return str(tmp_path)


def test_a_models_own_sampling_is_the_default(start_router: StartRouter, model_folder: str, tmp_path: Path) -> None:
    folder = folder_with(
        model_folder, tmp_path, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1,
        max_new_tokens=9, do_sample=True,
    )  # fmt: skip
    router = start_router(tokenizer_path=folder)
    assert router.chat().status_code == 200
    found = sampled(router)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.9, 20, 0.1)
    assert (found.repetition_penalty, found.max_tokens) == (1.1, 9)
    assert router.chat(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=12).json()
    found = sampled(router)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0, 1, 0, 0)
    assert (found.repetition_penalty, found.max_tokens) == (1, 12)

    router = start_router(tokenizer_path=folder, sampling_defaults=SamplingDefaults.OPENAI)
    assert router.chat(max_tokens=2).status_code == 200
    assert sampled(router).temperature == 1.0
    assert sampled(router).top_k == 0


def test_a_models_own_sampling_that_cannot_be_or_is_off(model_folder: str, tmp_path: Path) -> None:
    for declared in ({"temperature": -1}, {"top_k": "many"}, {"top_p": True}, {"top_k": 1.5}):
        config = RouterConfig(folder_with(model_folder, tmp_path, **declared), "fake")
        with pytest.raises(ConfigurationError, match=next(iter(declared))):
            defaults_of(config)
    config = RouterConfig(folder_with(model_folder, tmp_path, temperature=None, top_k=-1, eos_token_id=2), "fake")
    assert defaults_of(config) == Defaults(), "null and off mean the default"


def test_an_operators_template_takes_the_models_place(start_router: StartRouter, tmp_path: Path) -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    for own in (source, str(tmp_path / "own.jinja")):
        router = start_router(chat_template=own)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        ids = router.client.post("/tokenize", json=body).json()["tokens"]
        assert router.server.services.model.tokenizer.decode(ids) == "[hi]"
    with pytest.raises(ConfigurationError, match="neither a file nor a template"):
        start_router(chat_template=str(tmp_path / "none.jinja"))


def test_probes(router: RunningRouter) -> None:
    assert router.client.get("/ping").json() == router.client.post("/ping").json() == {"status": "ok"}
    assert router.client.get("/load").json() == {"server_load": 0}


def test_an_operator_can_have_every_stream_end_with_its_usage(start_router: StartRouter) -> None:
    router = start_router(include_usage=True)
    for answer in (router.complete(stream=True, max_tokens=2), router.chat(stream=True, max_tokens=2)):
        *_, last, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["usage"]["completion_tokens"] == 2
