"""Models whose KV is no uniform block of keys and values go over by Tandem's protocol, too: layers with a window beside full ones,
latents, and recurrent states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import NEEDS_PYTHON, answers_alone, is_at_rest, nodes, prompt, serve_vllm, until, write_model

pytestmark = [NEEDS_PYTHON, pytest.mark.timeout(900)]
TOKENS = 16
LENGTHS = (1, 31, 32, 33, 95, 96, 97, 128, 200, 256, 400, 700, 1500, 3000)
PROMPTS = [prompt(length, 3) for length in LENGTHS]


class Kind(NamedTuple):
    model: str
    config: str
    shape: dict[str, Any]
    flags: tuple[str, ...] = ()
    alone: Mapping[str, Any] = MappingProxyType({})
    in_company: bool = (
        True  # vLLM's own answers do not depend on what else it computes, as those to the last two kinds do on CPUs
    )


KINDS = {
    # Windows of 96 tokens in every other layer, so two groups of layers.
    "windows": Kind(
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_hidden_layers": 4, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 96,
         "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # vLLM's attention on CPUs takes latents of 512 numbers with positions of 64, and no others.
    "latents": Kind(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {"num_hidden_layers": 3, "intermediate_size": 256, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 3, "moe_intermediate_size": 64,
         "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "initializer_range": 0.1},
        # What vLLM takes by itself on processors with AMX keeps them in a way that is not handed over.
        flags=(
            "--set", "pools.prefill.engine_args={attention_backend: CPU_MLA}", "pools.decode.engine_args={attention_backend: CPU_MLA}",
        ),
        alone={"max_num_seqs": 1, "attention_backend": "CPU_MLA"},
        in_company=False,
    ),
    # Convolutions whose last inputs are a state, in three of four layers.
    "states": Kind(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"num_hidden_layers": 4, "intermediate_size": 256, "num_key_value_heads": 2, "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128,
         "layer_types": ["conv", "conv", "full_attention", "conv"]},
        ("--set", "cache.prefix_caching=false"),
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        in_company=False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    made, config = getattr(transformers, kind.model), getattr(transformers, kind.config)
    return write_model(tmp_path_factory.mktemp("model"), made, config, **kind.shape)


@pytest.fixture(scope="module")
def served(kind: Kind, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, httpx.Client]]:
    flags = ("--prefill", "1", "--decode", "1", "--set", "router.local_prefill=never", *kind.flags)
    yield from serve_vllm(model, tmp_path_factory.mktemp("path"), ("prefill", "decode"), *flags)


def test_answers_are_those_of_vllm_by_itself(kind: Kind, model: Path, served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    expected = answers_alone(model, PROMPTS, TOKENS, **kind.alone)

    def ask(tokens: list[int]) -> list[int]:
        body = {
            "model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    assert [ask(tokens) for tokens in PROMPTS] == expected
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, PROMPTS))
    assert found == expected or not kind.in_company
    until(client, lambda now: is_at_rest(now) and _received(now) == 2 * len(PROMPTS))
    now = nodes(client)
    failed = [(node["counters"]["loads_failed"], node["counters"]["transfer_refusals"]) for node in now]
    assert failed == [(0, {}), (0, {})]
    assert sum(node["counters"]["prompt_tokens_computed"] for node in now if node["role"] == "decode") == 0


def _received(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["transfers_finished"].get("received", 0) for node in found)
