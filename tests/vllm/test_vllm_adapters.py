"""LoRA adapters on nodes whose engine is vLLM: answers are those of PEFT's merged models, over the handoff, while adapters come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.model import tiny
from tests.engine.model.adapter_files import merged_answers, save_adapter
from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import NEEDS_PYTHON, is_at_rest, nodes, prompt, serve_vllm, until, write_model

pytestmark = [NEEDS_PYTHON, pytest.mark.timeout(900)]
KEY = "operators"
TOKENS, LONG = 12, 400
PROMPTS = [prompt(length, 6) for length in (1, 31, 33, 100, 300)]
ASKED_LONG = 3  # the place of a prompt
# What PEFT can be told about adapters.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "down_proj"], "r": 8, "use_rslora": True, "layers_to_transform": [1]},
    "patterns": {
        "target_modules": r".*\.(self_attn\.v_proj|mlp\.(up|gate)_proj)",
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 20},
    },
}


class Lab:
    """Folders and right answers by the adapter's name; `tiny` is the model without one."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.folders = {name: self.adapter(name, seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())}
        self.answers = {"tiny": [one.tokens for one in tiny.reference(model, PROMPTS, TOKENS)]}
        for name, where in self.folders.items():
            self.answers[name] = merged_answers(model, where, PROMPTS, TOKENS, folder / f"{name}-merged")

    def adapter(self, name: str, seed: int, model: Path | None = None, **options: Any) -> Path:
        folder = save_adapter(model or self.model, self.folder / name, seed, **options)
        # PEFT adds the model's own weights of the layer that makes logits.
        file = folder / "adapter_model.safetensors"
        save_file({key: value for key, value in load_file(file).items() if ".lora_" in key}, file)
        return folder

    def other_model(self, name: str, **shape: Any) -> Path:
        (self.folder / name).mkdir()
        config = {"intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
        return write_model(self.folder / name, LlamaForCausalLM, LlamaConfig, **{**config, **shape})


@pytest.fixture(scope="module")
def lab(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tiny_model, tmp_path_factory.mktemp("adapters"))
    assert len({json.dumps(answers) for answers in made.answers.values()}) == 1 + len(KINDS)
    return made


@pytest.fixture(scope="module")
def served(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, httpx.Client]]:
    """Fewer slots than adapters, so that these take turns."""
    flags = (
        "--prefill", "1", "--decode", "1", "--max-loras", "2",
        "--lora-modules", *(f"{name}={folder}" for name, folder in lab.folders.items()),
        "--set", "router.local_prefill=never", "router.api_keys=" + json.dumps([{"name": "ops", "key": KEY, "operator": True}]),
        f"controller.admin_folders=[{json.dumps(str(lab.folder))}]",
    )  # fmt: skip
    for command, client in serve_vllm(lab.model, tmp_path_factory.mktemp("path"), ("prefill", "decode"), *flags):
        client.headers["authorization"] = f"Bearer {KEY}"
        yield command, client


def body(model: str, tokens: list[int], **others: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        **others,
    }  # fmt: skip


def ask(client: httpx.Client, model: str, tokens: list[int], **others: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found in the cache."""
    response = client.post("/v1/completions", json=body(model, tokens, **others))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def adapters(client: httpx.Client, *words: str) -> tuple[int, str]:
    """Runs `tandem adapters`, and returns its status and what it says."""
    ended = subprocess.run(
        [sys.executable, "-m", "tandem.cluster.cli", "adapters", *words, "--url", str(client.base_url)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "TANDEM_API_KEY": KEY},
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


def received(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["transfers_finished"].get("received", 0) for node in found)


def names(client: httpx.Client) -> set[str]:
    return {card["id"] for card in client.get("/v1/models").json()["data"]}


def test_each_answer_is_that_of_its_own_adapter(lab: Lab, served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    assert names(client) == {"tiny", *KINDS}
    asked = [(name, place) for place in range(len(PROMPTS)) for name in lab.answers]
    for name, place in asked:
        assert ask(client, name, PROMPTS[place])[0] == lab.answers[name][place], (name, place)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: ask(client, each[0], PROMPTS[each[1]])[0], asked))
    wrong = [each for each, tokens in zip(asked, found, strict=True) if tokens != lab.answers[each[0]][each[1]]]
    assert not wrong, "rows of a step get other adapters than their own"
    until(client, lambda now: is_at_rest(now) and received(now) == 2 * len(asked))
    of_role = {node["role"]: node["counters"] for node in nodes(client)}
    assert of_role["decode"]["prompt_tokens_computed"] == 0
    assert all(not counters["loads_failed"] and not counters["transfer_refusals"] for counters in of_role.values())


def test_a_prefix_is_found_by_requests_with_the_same_adapter_alone(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    tokens = prompt(400, 50)
    assert [ask(client, name, tokens)[1] for name in ("tiny", "all", "some")] == [0, 0, 0]
    assert [ask(client, name, tokens)[1] for name in ("tiny", "all", "some")] == [384, 384, 384]


def test_an_adapter_is_replaced_and_unloaded_while_it_serves(lab: Lab, served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    tokens, place = PROMPTS[ASKED_LONG], ASKED_LONG
    whole, _ = ask(client, "all", tokens, max_tokens=LONG)
    found: list[int] = []
    began = False
    with client.stream("POST", "/v1/completions", json=body("all", tokens, max_tokens=LONG, stream=True)) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
            if found and not began:
                began = True
                status, said = adapters(client, "--load", f"all={lab.folders['some']}")
                assert status == 0, said
                assert ask(client, "all", tokens) == (lab.answers["some"][place], 0)
    assert found == whole, "it began with the earlier weights"
    assert ask(client, "all", tokens) == (lab.answers["some"][place], 96)
    status, said = adapters(client, "--load", f"new={lab.folders['all']}", "--unload", "patterns")
    assert status == 0, said
    assert names(client) == {"tiny", "all", "some", "new"}
    assert ask(client, "new", tokens)[0] == lab.answers["all"][place]
    assert client.post("/v1/completions", json=body("patterns", tokens)).status_code == 404
    assert ask(client, "tiny", tokens)[0] == lab.answers["tiny"][place]
    until(client, is_at_rest)


def test_an_adapter_that_vllm_cannot_compute_is_refused_and_changes_nothing(
    lab: Lab, served: tuple[Serve, httpx.Client]
) -> None:
    _, client = served
    before = names(client)
    smaller = lab.other_model("smaller-model", hidden_size=64)
    deeper = lab.other_model("deeper-model", num_hidden_layers=4)
    damaged = lab.adapter("damaged", 9)
    file = damaged / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for folder, said in (
        (lab.adapter("high", 9, r=17), "has rank 17, and model.max_lora_rank is 16"),
        (lab.adapter("of-smaller", 9, smaller), "have another size than these layers of the model"),
        (lab.adapter("of-deeper", 9, deeper), "changes model.layers.3."),
        (lab.adapter("of-logits", 9, target_modules=["lm_head"]), "changes lm_head, which"),
        (damaged, "damaged or cut short"),
    ):
        status, told = adapters(client, "--load", f"good={lab.folders['patterns']}", f"bad={folder}")
        assert status != 0
        assert "'bad'" in told
        assert said in told
        assert names(client) == before
    assert ask(client, "some", PROMPTS[4])[0] == lab.answers["some"][4]
    assert adapters(client, "--load", f"good={lab.folders['patterns']}")[0] == 0
    assert ask(client, "good", PROMPTS[4])[0] == lab.answers["patterns"][4]


def test_an_adapter_that_cannot_be_read_is_named_before_the_model_is_loaded(lab: Lab, tmp_path: Path) -> None:
    folder = lab.adapter("cut-short", 9)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "tandem").symlink_to(Path(__file__).parents[2] / "tandem")
    command = Serve(
        str(lab.model), "--engine", "vllm", "--aggregated", "1", "--max-loras", "1", "--lora-modules", f"law={folder}",
        "--set", f"model.engine_python={os.environ['TANDEM_VLLM_PYTHON']}", "model.device=cpu",
        f"pools.aggregated.env={{PYTHONPATH: {tmp_path}}}",
    )  # fmt: skip
    try:
        command.until(r"the adapter 'law' .* is damaged or cut short", 120)
    finally:
        command.kill_all()
