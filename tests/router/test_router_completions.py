from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.wire.requests import TransferRole
from tandem.wire.sampling import RepetitionDetection
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_node import scripted


def test_both_nodes_are_told_at_once_under_one_transfer_and_the_answer_is_theirs(router: RunningRouter) -> None:
    answer = router.complete(prompt="the quick fox", max_tokens=6, seed=7)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"]) == ("text_completion", "fake")
    text = router.expected("the quick fox", 6, seed=7)
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer.headers["x-tandem-nodes"] == "prefill=p0,decode=d0"
    assert "prefill p0" in answer.headers["x-tandem-decision"]

    (produce,), (consume,) = router.nodes["p0"].submits, router.nodes["d0"].submits
    assert produce.request_id == consume.request_id
    assert produce.transfer is not None
    assert consume.transfer is not None
    assert (produce.transfer.role, consume.transfer.role) == (TransferRole.PRODUCE, TransferRole.CONSUME)
    assert produce.transfer.transfer_id == consume.transfer.transfer_id
    assert len(produce.transfer.transfer_id) > 20
    for peer, node in ((produce.transfer.peer, "d0"), (consume.transfer.peer, "p0")):
        assert (peer.node_id, peer.epoch) == (node, router.nodes[node].info.epoch)
        assert peer.endpoint == router.nodes[node].info.peer_endpoint
    assert produce.sampling == consume.sampling
    assert produce.sampling.seed == 7


def test_usage_counts_prompt_answer_and_what_was_cached(start_router: StartRouter, tokenizer: Tokenizer) -> None:
    router = start_router()
    prompt = tokenizer.encode("the quick brown fox jumps over", special=True)
    router.nodes["d0"].set(pause_at=0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(router.complete, prompt=prompt, max_tokens=5)
        # Or the decode node may be through before the prefill node has said what it had.
        router.wait_for(lambda: router.metric("tandem_time_to_first_token_seconds_count") == 1, "it has")
        router.nodes["d0"].resume()
        usage = answer.result(10).json()["usage"]
    details = usage.pop("prompt_tokens_details")
    assert usage == {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}
    assert details == {"cached_tokens": len(prompt) // 4}


@pytest.mark.parametrize(
    ("roles", "nodes", "why"),
    [({}, "decode=d0", "no prefill node"), ({"decode": 0, "aggregated": 1}, "aggregated=a0", "a0 does both")],
)
def test_without_a_prefill_node_another_one_reads_the_prompt(
    start_router: StartRouter, roles: dict[str, int], nodes: str, why: str
) -> None:
    router = start_router(prefill=0, **roles)
    answer = router.complete(max_tokens=4, seed=1)
    assert answer.json()["choices"][0]["text"] == router.expected("the fox", 4, seed=1)
    (node,) = router.nodes.values()
    assert node.submits[0].transfer is None
    assert answer.headers["x-tandem-nodes"] == nodes
    assert why in answer.headers["x-tandem-decision"]


def test_one_token_is_the_prefill_nodes_alone(router: RunningRouter) -> None:
    answer = router.complete(max_tokens=1, seed=3)
    assert answer.json()["choices"][0]["text"] == router.expected("the fox", 1, seed=3)
    assert router.nodes["p0"].submits[0].transfer is None
    assert router.nodes["d0"].submits == []


def test_an_answer_that_ends_with_its_first_token_ends_on_both_nodes(start_router: StartRouter, end_token: int) -> None:
    router = start_router(rule=scripted([end_token]))
    answer = router.complete(max_tokens=9).json()
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    decode = router.nodes["d0"]
    decode.wait_until(lambda: bool(decode.submits), "told of the request, though it may be over already")
    request_id = decode.submits[0].request_id
    decode.wait_until(lambda: request_id in decode.cancels, "told that the request is over")
    decode.wait_until(lambda: not decode.running, "nothing runs")


def test_the_same_prompt_several_times_is_several_samples_unless_it_has_a_seed(router: RunningRouter) -> None:
    def texts(**fields: object) -> list[str]:
        answer = router.complete(prompt=["the fox"] * 3, n=2, max_tokens=12, **fields).json()
        return [choice["text"] for choice in answer["choices"]]

    assert len({*texts(), *texts()}) == 12
    seeded = texts(seed=5)
    assert seeded[:2] == seeded[2:4] == seeded[4:]
    assert texts(seed=5) == seeded


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(start_router: StartRouter) -> None:
    router = start_router(decode=2)
    body = router.complete(prompt=["the fox", "a dog"], n=2, max_tokens=4, seed=10).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        router.expected(prompt, 4, seed=seed) for prompt in ("the fox", "a dog") for seed in (10, 11)
    ]
    assert body["usage"]["completion_tokens"] == 16
    echoed = router.complete(prompt=["the fox", "a dog"], echo=True, max_tokens=1).json()["choices"]
    assert [choice["text"][:5] for choice in echoed] == ["the f", "a dog"], "each begins with its own prompt"


def test_token_ids_are_a_prompt(router: RunningRouter, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox", special=True)
    one = router.complete(prompt=ids, max_tokens=3, seed=1).json()
    assert one["choices"][0]["text"] == router.expected("the fox", 3, seed=1)
    two = router.complete(prompt=[ids, ids], max_tokens=3, seed=1).json()
    assert [choice["text"] for choice in two["choices"]] == [one["choices"][0]["text"]] * 2


def test_echo_shows_the_prompt_and_with_no_tokens_nothing_else(router: RunningRouter) -> None:
    shown = router.complete(prompt="the fox", echo=True, max_tokens=3, seed=1).json()["choices"][0]
    assert shown["text"] == "the fox" + router.expected("the fox", 3, seed=1)
    scored = router.complete(prompt="the fox", echo=True, max_tokens=0, logprobs=1, seed=1).json()
    (choice,) = scored["choices"]
    assert choice["text"] == "the fox"
    assert choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["the", " fox"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] < 0
    assert logprobs["text_offset"] == [0, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_shows_no_token_that_it_does_not_count(router: RunningRouter, stream: bool) -> None:
    assert '"token_ids":[]' in router.complete(echo=True, max_tokens=0, return_token_ids=True, stream=stream).text


def test_logprobs_stand_beside_their_tokens(router: RunningRouter, tokenizer: Tokenizer) -> None:
    choice = router.complete(max_tokens=4, logprobs=2, seed=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) == 2


def test_best_of_answers_with_the_likeliest(router: RunningRouter, tokenizer: Tokenizer) -> None:
    body = router.complete(max_tokens=2, best_of=6, n=2, seed=20).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    ids = tokenizer.encode("the fox", special=True)

    def likelihood(seed: int) -> float:
        return sum(-0.25 - router.board.rule(ids, seed, index) % 7 for index in range(2))

    ranked = sorted(range(20, 26), key=likelihood, reverse=True)[:2]
    assert [choice["text"] for choice in body["choices"]] == [router.expected("the fox", 2, seed=s) for s in ranked]
    assert body["usage"]["completion_tokens"] == 12


def test_a_stop_string_over_several_tokens_ends_the_answer_and_the_work(
    start_saying: StartRouter, tokenizer: Tokenizer
) -> None:
    script = tokenizer.encode("one two three four five six", special=False)
    router = start_saying("one two three four five six", ends=False)
    body = router.complete(max_tokens=400, stop=["ee fo", "unused"]).json()
    assert body["choices"][0]["text"] == "one two thr"
    assert body["choices"][0]["finish_reason"] == "stop"
    spoken = next(n for n in range(1, len(script)) if "ee fo" in tokenizer.decode(script[:n]))
    assert body["usage"]["completion_tokens"] == spoken
    for node in router.nodes.values():
        node.wait_until(lambda node=node: not node.running, "the rest is not generated")  # type: ignore[misc]
    included = router.complete(max_tokens=400, stop="ee fo", include_stop_str_in_output=True).json()
    assert included["choices"][0]["text"] == "one two three fo"


def test_a_stop_string_that_only_the_end_completes_is_the_reason(
    start_router: StartRouter, tokenizer: Tokenizer
) -> None:
    part = tokenizer.encode("日", special=False)[:1]  # a third of a character, which is shown as U+FFFD at the end
    assert tokenizer.decode(part) == "\ufffd"
    router = start_router(rule=scripted(part))
    for stop, shown in (("\ufffd", ("", "stop")), ("x", ("\ufffd", "length"))):
        choice = router.complete(max_tokens=1, stop=stop).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == shown


def test_a_stop_string_counts_only_after_min_tokens(start_saying: StartRouter) -> None:
    router = start_saying("x", ends=False)
    assert router.complete(max_tokens=9, stop="x").json()["choices"][0]["text"] == ""
    assert router.complete(max_tokens=9, stop="x", min_tokens=4).json()["choices"][0]["text"] == "xxxx"


def test_a_stop_token_ends_the_answer_and_is_not_shown(start_saying: StartRouter, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("xyzw", special=False)
    router = start_saying("xyzw", ends=False)
    body = router.complete(max_tokens=50, stop_token_ids=[script[2]]).json()
    assert body["choices"][0]["text"] == tokenizer.decode(script[:2])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("streams", [False, True])
def test_what_of_the_request_ended_an_answer_is_its_stop_reason(
    start_saying: StartRouter, tokenizer: Tokenizer, *, streams: bool
) -> None:
    """As vLLM has it: with the finish reason, and none for the model's own end."""
    script = tokenizer.encode("one two", special=False)
    router = start_saying("one two")
    for fields, reason in (
        ({"stop": ["two", "unused"]}, "two"),
        ({"stop_token_ids": [script[1]]}, script[1]),
        ({}, None),
        ({"max_tokens": 1}, None),
    ):
        for ask in (router.complete, router.chat):
            answer = ask(**{"max_tokens": 50, "stream": streams, **fields})
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
            *earlier, last = [json.loads(event)["choices"][0] for event in events]
            assert last["stop_reason"] == reason
            assert last["finish_reason"]
            assert not any("stop_reason" in choice for choice in earlier)


def test_characters_of_several_tokens_come_whole(start_saying: StartRouter) -> None:
    text = "ok 😀 naïve 漢字! 🤷🏽‍♀️ ends in 🎉"
    router = start_saying(text)
    assert router.complete(max_tokens=500).json()["choices"][0]["text"] == text
    with router.stream(max_tokens=500) as events:
        got = [body["choices"][0]["text"] for body in events.rest() if body != "[DONE]"]
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got)


def test_what_the_nodes_are_told(router: RunningRouter, tokenizer: Tokenizer) -> None:
    answer = router.complete(
        max_tokens=2, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, min_tokens=1, logit_bias={"5": -100}, stop_token_ids=[4], ignore_eos=True,
        bad_words=["fox"], priority=3, cache_salt="mine", user="someone", seed=-1,
        repetition_detection={"max_pattern_size": 9, "min_count": 3}, hidden_states="probe-1",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    submit = router.nodes["p0"].submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (2, 1, True)
    assert sampling.logit_bias == {5: -100}
    assert sampling.stop_token_ids == [4]
    assert tokenizer.encode(" fox", special=False) in sampling.bad_words
    assert sampling.repetition_detection == RepetitionDetection(9, 1, 3)
    assert sampling.hidden_states == "probe-1"
    assert (submit.priority, submit.cache_salt) == (3, "mine")
    assert 0 <= sampling.seed < 2**63
    assert 1700 < submit.timeout_s <= 1800


LONGEST_PIECE = 256 << 10


def test_a_large_answer_comes_in_chunks_and_whole(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    answer = router.complete(max_tokens=400, n=4, logprobs=20, seed=3)
    assert answer.status_code == 200
    assert len(answer.content) > LONGEST_PIECE
    assert "content-length" not in answer.headers
    for index, choice in enumerate(answer.json()["choices"]):
        assert choice["text"] == router.expected("the fox", 400, seed=3 + index)
        assert len(choice["logprobs"]["tokens"]) == 400
    small = router.complete(max_tokens=4)
    assert int(small.headers["content-length"]) == len(small.content)


def test_a_reader_that_fell_far_behind_gets_every_token(start_router: StartRouter) -> None:
    router = start_router(prefill=0).with_small_buffers()
    with router.stream(max_tokens=400, logprobs=20, n=4, seed=3) as events:
        router.wait_for(router.idle, "all of it is there, and nothing is read")
        choices = [body["choices"][0] for body in events.rest() if body != "[DONE]"]
    for index in range(4):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == router.expected("the fox", 400, seed=3 + index)
        assert sum(len(choice["logprobs"]["tokens"]) for choice in mine) == 400


CHAT = "/v1/chat/completions"


def prompt_of(*messages: tuple[str, str]) -> str:
    return "".join(f"<|start|>{role}\n{content}<|end|>\n" for role, content in messages) + "<|start|>assistant\n"


def test_messages_go_through_the_models_template(router: RunningRouter) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
    ]
    body = router.ask(CHAT, messages=messages, max_completion_tokens=5, seed=4).json()
    expected = prompt_of(("system", "be brief"), ("user", "hi\nyou"))
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == router.expected(expected, 5, seed=4, special=False)
    assert choice["finish_reason"] == "length"
    # A message to go on with.
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    body = router.ask(CHAT, messages=messages, max_tokens=3, seed=1, continue_final_message=True).json()
    prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\nI say"
    assert body["choices"][0]["message"]["content"] == router.expected(prompt, 3, seed=1, special=False)


def test_without_a_limit_the_answer_may_fill_the_context(start_router: StartRouter, tokenizer: Tokenizer) -> None:
    body = start_router(prefill=0, node={"max_model_len": 40}).chat("hi").json()
    assert body["usage"]["total_tokens"] == 40
    assert body["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_name_token_bytes_and_alternatives(router: RunningRouter) -> None:
    choice = router.chat(max_tokens=3, logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in content] == [entry["token"] for entry in content]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    bare = router.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(router: RunningRouter) -> None:
    answer = router.chat(stream=True, max_tokens=4, seed=2, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    *with_choices, last = bodies = [json.loads(line) for line in lines]
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert len({body["id"] for body in bodies}) == 1
    assert with_choices[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(body["choices"][0]["delta"].get("content", "") for body in with_choices)
    assert text == router.expected(prompt_of(("user", "hi")), 4, seed=2, special=False)
    assert with_choices[-1]["choices"][0]["finish_reason"] == "length"
    assert with_choices[-1]["choices"][0]["delta"] == {}
    assert all(body["usage"] is None for body in with_choices)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_choices_are_each_complete(start_router: StartRouter, n: int) -> None:
    router = start_router(decode=2)
    with router.stream(n=n, max_tokens=6, seed=30, logprobs=0) as events:
        bodies = events.rest()
    assert bodies.pop() == "[DONE]"
    for index in range(n):
        mine = [body["choices"][0] for body in bodies if body["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == router.expected("the fox", 6, seed=30 + index)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert sum(len(c["logprobs"]["tokens"]) for c in mine if c["logprobs"]) == 6
