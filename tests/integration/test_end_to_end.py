"""A prompt goes in and an answer comes out, through all of Tandem's processes."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from tandem.cluster.trace.account import first_token_s, handover
from tandem.cluster.trace.command import TraceClient
from tandem.cluster.trace.why import explain
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.tracing import TracePhase
from tests.faults.processes import actors
from tests.integration.conftest import BLOCK_BYTES, BLOCK_SIZE, PATIENCE_S, Deploy, RunningDeployment, float32_config
from tests.integration.reference import LENGTHS, NEW_TOKENS, ExpectedAnswer
from tests.more import more
from tests.waiting import until

AT_ONCE = 8
SALT = "these tests"  # what others of this deployment asked before is not found
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "maxItems": 2},
    },
    "required": ["first_name", "age_in_years", "likes"],
    "additionalProperties": False,
}


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


async def stream_all(server: RunningDeployment, expected: list[ExpectedAnswer], at_once: int) -> list[tuple[str, str]]:
    """Streams all prompts, `at_once` at a time, and returns (text, finish reason) of each."""
    gate = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, item: ExpectedAnswer) -> tuple[str, str]:
        body = {
            "model": server.model,
            "prompt": item.prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "stream": True,
            "cache_salt": SALT,
        }
        text, finish, done = "", "", False
        async with gate, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
        assert done
        return text, finish

    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        return await asyncio.gather(*(one(client, item) for item in expected))


def assert_same(answers: list[tuple[str, str]], expected: list[ExpectedAnswer]) -> None:
    for (text, finish), item in zip(answers, expected, strict=True):
        assert (text, finish) == (item.text, item.finish), f"prompt of {len(item.prompt)} tokens"


class TestOnePrefillOneDecode:
    def test_nodes_do_not_stand_behind_whatever_else_the_machine_does(self, server: RunningDeployment) -> None:
        processes = [process for kind in ("prefill", "decode", "router") for process in actors(kind)]
        assert len(processes) == 3
        assert {process.nice() for process in processes} == {psutil.Process().nice()}

    def test_streamed_and_together_the_tokens_are_transformers_own(
        self, server: RunningDeployment, expected: list[ExpectedAnswer]
    ) -> None:
        server.until_quiet()
        before = [server.counters(role) for role in ("prefill", "decode")]
        assert_same(asyncio.run(stream_all(server, expected, AT_ONCE)), expected)
        nodes = server.until_quiet()
        assert {node["role"] for node in nodes} == {"prefill", "decode"}
        after = [server.counters(role) for role in ("prefill", "decode")]
        prefill, decode = (
            {name: now[name] - then[name] for name in now} for now, then in zip(after, before, strict=True)
        )
        needed = sum(blocks_of(length) for length in LENGTHS)
        assert decode["prompt_tokens_computed"] == 0
        assert prefill["prompt_tokens_computed"] == decode["prompt_tokens_received"] == sum(LENGTHS)
        assert prefill["transfer_blocks_sent"] == decode["transfer_blocks_received"] == needed
        assert prefill["transfer_bytes_sent"] == decode["transfer_bytes_received"] == needed * BLOCK_BYTES

    def test_received_kv_is_what_this_node_computes_itself(self, server: RunningDeployment) -> None:
        """The canary has had idle time since the prompts of the previous test."""
        until(lambda: server.counters("decode")["kv_checks"] >= 1, PATIENCE_S)
        assert all(not node["counters"]["wrong_kv"] for node in server.nodes("decode"))
        server.until_quiet()

    def test_not_streamed_and_again_only_what_the_decode_node_lacks_is_sent(
        self, server: RunningDeployment, expected: list[ExpectedAnswer]
    ) -> None:
        before = server.counters("decode")
        answers = []
        for item in expected:
            answer = server.complete(item.prompt, NEW_TOKENS, cache_salt=SALT)
            answers.append((answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]))
            assert answer["usage"]["prompt_tokens"] == len(item.prompt)
            assert answer["usage"]["completion_tokens"] == len(item.tokens)
        assert_same(answers, expected)
        server.until_quiet()
        after = server.counters("decode")
        # A prompt's last token is never taken from the cache, so its block is transferred again.
        lacking = sum(blocks_of(n) - (n - 1) // BLOCK_SIZE for n in LENGTHS)
        assert after["transfer_blocks_received"] - before["transfer_blocks_received"] == lacking
        assert after["prompt_tokens_computed"] == before["prompt_tokens_computed"]

    def test_all_at_once_and_one_by_one_the_log_probabilities_are_the_same_bits(
        self, server: RunningDeployment
    ) -> None:
        """At once the prompts are new, in one batch, and cut into chunks; one by one they are found in the prefix caches."""
        rng = random.Random(3)
        prompts = [[rng.randrange(1000, 40_000) for _ in range(length)] for length in (7, 33, 90, 300)]
        fields = [{"logprobs": 2, "temperature": float(seed % 2), "seed": seed} for seed in range(4)]

        def ask(asked: tuple[list[int], dict[str, Any]]) -> Any:
            return server.complete(asked[0], 24, **asked[1])["choices"][0]["logprobs"]

        asked = list(zip(prompts, fields, strict=True))
        with ThreadPoolExecutor(len(asked)) as clients:
            together = list(clients.map(ask, asked))
        assert [ask(one) for one in asked] == together
        server.until_quiet()

    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
    def test_a_chat_answers_by_its_schema(self, server: RunningDeployment, sampling: dict[str, Any]) -> None:
        """The prefill node samples the first token and the decode node all others; both follow the grammar from the same state. What the
        schema forces takes no steps of its own."""
        server.until_quiet()
        before = server.counters("decode")
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": "Describe a person named Ada, aged 36, as JSON."}],
            "max_tokens": 80,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            **sampling,
        }
        first, second = (server.http.post("/v1/chat/completions", json=body).json() for _ in range(2))
        choice = first["choices"][0]
        assert choice["finish_reason"] == "stop", first
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        assert second["choices"][0]["message"]["content"] == choice["message"]["content"]
        server.until_quiet()
        after = server.counters("decode")
        counted = {name: after[name] - before[name] for name in after}
        assert counted["grammar_tokens_forced"] > 3
        assert counted["decode_steps"] < counted["output_tokens"]

    def test_fifty_clients_that_hang_up_leave_nothing_behind(
        self, server: RunningDeployment, expected: list[ExpectedAnswer]
    ) -> None:
        rng = random.Random(11)

        async def hang_up(client: httpx.AsyncClient, prompt: list[int], patience: float) -> None:
            body = {
                "model": server.model,
                "prompt": prompt,
                "max_tokens": 400,
                "temperature": 0.8,
                "ignore_eos": True,
                "stream": rng.random() < 0.7,
            }
            try:
                async with asyncio.timeout(patience):
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        async for _ in response.aiter_lines():
                            pass
            except TimeoutError:
                pass

        async def storm() -> None:
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(
                base_url=server.url, timeout=PATIENCE_S, limits=limits, trust_env=False
            ) as client:
                await asyncio.gather(
                    *(
                        hang_up(
                            client,
                            [rng.randrange(1000, 40000) for _ in range(rng.choice([5, 40, 300, 700]))],
                            rng.uniform(0.01, 6),
                        )
                        for _ in range(50)
                    )
                )

        asyncio.run(storm())
        server.until_quiet()
        item = expected[5]
        answer = server.complete(item.prompt, NEW_TOKENS)
        assert answer["choices"][0]["text"] == item.text

    def test_a_traced_request_shows_where_its_time_went(self, server: RunningDeployment) -> None:
        """With the real clocks of four processes, every phase is reported, in a possible order."""
        prompt = list(range(1000, 1400))
        body = {"model": server.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        response = server.http.post("/v1/completions", json=body, headers={"x-tandem-trace": "1"})
        assert response.status_code == 200, response.text
        client = TraceClient(server.url, None)
        record = client.find(response.json()["id"])
        client.close()
        assert record.missing == []
        parts = {part.role: part for part in record.nodes}
        assert set(parts) == {"prefill", "decode"}
        assert all(part.clock_offset_s == 0 for part in record.nodes), "one machine, one clock"
        for part in record.nodes:
            assert all(record.began <= span.start <= span.end for span in part.spans)
        prefill = {span.phase for span in parts["prefill"].spans}
        assert {
            TracePhase.INBOX,
            TracePhase.QUEUE,
            TracePhase.PREFILL,
            TracePhase.PLAN,
            TracePhase.WRITE,
            TracePhase.NOTICE,
        } <= prefill
        written = [span for span in parts["prefill"].spans if span.phase is TracePhase.WRITE]
        assert sum(span.num_bytes for span in written) == blocks_of(len(prompt)) * BLOCK_BYTES
        decode = [span.phase for span in parts["decode"].spans]
        assert decode.count(TracePhase.DECODE) == 5
        assert {TracePhase.INBOX, TracePhase.QUEUE, TracePhase.RECEIVE, TracePhase.REGISTER, TracePhase.RESUME} <= set(
            decode
        )
        explained = explain(record)
        assert sum(part.seconds for part in explained.to_first_token) == pytest.approx(first_token_s(record), rel=0.01)
        assert len(handover(record)) == 3


@pytest.mark.parametrize(("prefill", "decode", "aggregated"), more([(0, 0, 1), (2, 2, 0)]))
def test_other_shapes_give_the_same_tokens(
    deploy: Deploy, smollm2_path: Path, expected: list[ExpectedAnswer], prefill: int, decode: int, aggregated: int
) -> None:
    with deploy(float32_config(smollm2_path, prefill, decode, aggregated)) as server:
        assert_same(asyncio.run(stream_all(server, expected, AT_ONCE)), expected)
        nodes = server.until_quiet()
        assert len(nodes) == prefill + decode + aggregated
        if aggregated:
            assert server.counters("aggregated")["transfer_blocks_received"] == 0
        else:
            assert server.counters("decode")["prompt_tokens_computed"] == 0
            assert all(node["counters"]["prompt_tokens_computed"] > 0 for node in server.nodes("prefill"))


@pytest.mark.parametrize("policy", [LoadFailurePolicy.FAIL, *more([LoadFailurePolicy.RECOMPUTE])])
def test_a_transfer_that_fails_ends_the_request_only_where_the_operator_says_so(
    deploy: Deploy, smollm2_path: Path, expected: list[ExpectedAnswer], policy: LoadFailurePolicy
) -> None:
    """No transfer arrives within a millisecond."""
    config = float32_config(smollm2_path, prefill=1, decode=1)
    transfer = msgspec.structs.replace(config.transfer, timeout_s=0.001, on_failure=policy)
    item = max(expected, key=lambda each: len(each.prompt))
    body = {"prompt": item.prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    with deploy(msgspec.structs.replace(config, transfer=transfer)) as server:
        answer = server.http.post("/v1/completions", json={"model": server.model, **body})
        server.until_quiet()
        decode = server.counters("decode")
        if policy is LoadFailurePolicy.FAIL:
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "kv_load_failed")
            assert "no KV within 0.001 s" in answer.json()["error"]["message"]
            assert decode["prompt_tokens_computed"] == 0
        else:
            choice = answer.raise_for_status().json()["choices"][0]
            assert_same([(choice["text"], choice["finish_reason"])], [item])
            assert decode["prompt_tokens_computed"] == len(item.prompt)


class TestPromptsAsEmbeddings:
    def test_the_answers_are_those_of_their_tokens_with_and_without_a_cached_prefix(
        self, server: RunningDeployment, smollm2_path: Path, expected: list[ExpectedAnswer]
    ) -> None:
        server.until_quiet()
        before = server.counters("decode")
        some = [item for item in expected if len(item.prompt) in (5, 33, 200)]
        rows = embeddings(smollm2_path, [item.prompt for item in some])
        for _ in range(2):
            answers = [ask_with(server, each).raise_for_status().json()["choices"][0] for each in rows]
            assert_same([(each["text"], each["finish_reason"]) for each in answers], some)
        together = ask_with(server, rows).raise_for_status().json()["choices"]
        assert_same([(each["text"], each["finish_reason"]) for each in together], some)
        server.until_quiet()
        after = server.counters("decode")
        assert after["prompt_tokens_computed"] == before["prompt_tokens_computed"]
        assert after["prompt_tokens_cached"] - before["prompt_tokens_cached"] >= 2 * (32 + 192)


def encoded(rows: torch.Tensor) -> str:
    return base64.b64encode(save({"rows": rows})).decode()


def embeddings(model: Path, prompts: list[list[int]]) -> list[str]:
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        table = tensors.get_tensor("model.embed_tokens.weight")
    return [encoded(table[prompt]) for prompt in prompts]


def ask_with(server: RunningDeployment, rows: str | list[str]) -> httpx.Response:
    body = {"model": server.model, "prompt_embeds": rows, "max_tokens": NEW_TOKENS, "temperature": 0}
    return server.http.post("/v1/completions", json=body)
