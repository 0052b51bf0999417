"""A node whose engine is vLLM, over a tiny model with random weights. These tests run in vLLM's own environment: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.integration.cluster_lab import Serve
from tests.listening import listening_addresses
from tests.small_model import CHAT_TEMPLATE, CORPUS

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
NEEDS_PYTHON = pytest.mark.skipif(
    not PYTHON, reason="TANDEM_VLLM_PYTHON names no Python with vLLM: `make test-vllm` sets it"
)
START_S = 900.0
ARGS = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 400}
STEP_TOKENS = 256
CONTEXT = 4096


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights whose greedy answers do not repeat themselves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return write_model(
        tmp_path_factory.mktemp("tiny"),
        LlamaForCausalLM,
        LlamaConfig,
        intermediate_size=256,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=32,
    )


def write_model(folder: Path, model: Any, config: Any, **settings: Any) -> Path:
    """Writes a model with random weights, four heads, and a tokenizer."""
    import torch

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|start|>", "<|end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    backend.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    torch.manual_seed(7)
    shape = {
        "vocab_size": backend.get_vocab_size(), "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    model(config(**{**shape, **settings})).to(torch.float32).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 131 + i * i * 7 + i * (seed + 3)) % 350 for i in range(length)]


def answers_alone(model: Path, prompts: list[list[int]], max_tokens: int, **other: Any) -> list[list[int]]:
    args = {
        **ARGS,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 16,
        **other,
    }
    ended = subprocess.run(
        [PYTHON or sys.executable, str(Path(__file__).parent / "alone.py"), str(model)],
        input=json.dumps({"args": args, "prompts": prompts, "max_tokens": max_tokens}),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[list[int]] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[Any]:
    from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
    from tandem.engine.vllm.wing import make

    model = ModelConfig(path=str(tiny_model), dtype="float32", device="cpu", engine="vllm", engine_args=dict(ARGS))
    config = EngineConfig(
        model=model,
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(
            max_model_len=CONTEXT, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=16, max_loras=2
        ),
    )
    made = make(config, model, lambda what, fraction: None, None)
    yield made
    made.shutdown()


def write_adapter(folder: Path, layers: dict[str, tuple[int, int]], seed: int = 1) -> Path:
    """As PEFT writes it, which vLLM's environment lacks. `layers`: the inputs and outputs of each."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [name.rpartition(".")[2] for name in layers],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in layers.items():
        for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=random) * 0.15
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def serve_vllm(
    model: Path, path: Path, pools: Sequence[str], *flags: str, env: str = ""
) -> Iterator[tuple[Serve, httpx.Client]]:
    """Serves the model with nodes in vLLM's environment. `env`: further variables of theirs, such as `A: 1`."""
    (path / "tandem").symlink_to(Path(__file__).parents[2] / "tandem")
    settings = [f"pools.{pool}.env={{PYTHONPATH: {path}, {env}}}" for pool in pools]
    command = Serve(
        str(model), "--engine", "vllm", "--dtype", "float32", "--max-model-len", str(CONTEXT), *flags,
        "--set", f"model.engine_python={PYTHON}", "model.engine_args={enforce_eager: true, block_size: 32}",
        "model.device=cpu", f"scheduler.max_num_batched_tokens={STEP_TOKENS}", "model.served_name=tiny", *settings,
    )  # fmt: skip
    try:
        command.until(r"engine: ready: vllm 0\.32", 60)
        url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield command, client
    finally:
        command.kill_all()


def ask_in_stream(
    client: httpx.Client, prompt: list[int], max_tokens: int, on_tokens: Callable[[], object]
) -> list[int]:
    """The tokens of a greedy answer. `on_tokens` is called each time that some have come."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    found: list[int] = []
    with client.stream("POST", "/v1/completions", json=body, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line.removeprefix("data: "))
                assert "choices" in said, said
                found += [token for choice in said["choices"] for token in choice.get("token_ids") or []]
            if found:
                on_tokens()
    return found


def nodes(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/cluster").json()["nodes"]
    return found


def is_at_rest(found: list[dict[str, Any]]) -> bool:
    return not any(node["running"] or node["waiting"] or node["free_blocks"] != node["total_blocks"] for node in found)


def until(client: httpx.Client, condition: Callable[[list[dict[str, Any]]], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition(found := nodes(client)):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def aborted(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["requests_finished"].get("abort", 0) for node in found)


def pid_of_node(command: Serve, client: httpx.Client, name: str) -> int:
    """The process that listens where routers reach the node."""
    (endpoint,) = (node["request_endpoint"] for node in nodes(client) if node["node_id"] == name)
    host, _, port = endpoint.rpartition(":")
    (pid,) = (pid for pid in command.processes() if (host, int(port)) in listening_addresses(pid))
    return pid
