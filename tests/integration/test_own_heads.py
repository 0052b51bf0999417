"""Nodes behind a router, whose model has a head for drafts and experts: the drafts are taken where the answer is made, no token changes,
and a prompt's file says which experts its tokens were routed to."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from tandem.decode_node.node import DecodeNode
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.prefill_node.node import PrefillNode
from tandem.router.config import Heartbeat, LocalPrefill, RouterConfig
from tandem.wire.nodes import NodeInfo, Role
from tests.engine import mtp_files
from tests.engine.model import tiny
from tests.router.conftest import LETTERS, RunningRouter
from tests.waiting import until

OUTPUT_TOKENS = 40
PATIENCE_S = 100.0


class HeadedNode:
    def __init__(self, role: Role, model: Path, states: Path) -> None:
        engine = EngineConfig(
            model=ModelConfig(
                path=str(model), served_name="fake", dtype="float32", device="cpu", threads=1, draft="mtp",
                hidden_states_folder=str(states),
            ),
            cache=CacheConfig(memory_bytes=4 << 20),
            scheduler=SchedulerConfig(num_speculative_tokens=3, max_draft_loss=1.0),
        )  # fmt: skip
        config = NodeConfig(f"{role.value}-0", role, engine=engine, transfer=TransferConfig())
        self.node = PrefillNode(config) if role is Role.PREFILL else DecodeNode(config)
        self.info: NodeInfo = msgspec.structs.replace(self.node.start(), tokenizer="")

    def kill(self) -> None:
        self.node.stop()


@pytest.mark.more
def test_a_checkpoints_own_head_guesses_and_the_experts_of_a_prompt_are_written(
    model_folder: str, tmp_path: Path
) -> None:
    path, folder = mtp_files.save("glm4-moe", tmp_path, right=True), tmp_path / "states"
    prompt = [3 + 7 * place % 90 for place in range(37)]
    (expected,) = tiny.reference(path, [prompt], OUTPUT_TOKENS)
    config = RouterConfig(
        tokenizer_path=model_folder,
        model_name="fake",
        port=0,
        heartbeat=Heartbeat(silence=20.0, starved=20.0),
        local_prefill=LocalPrefill.NEVER,
    )
    cluster = RunningRouter(config, LETTERS, eos=1)
    with contextlib.closing(cluster):
        for role in (Role.PREFILL, Role.DECODE):
            cluster.nodes[f"{role.value}-0"] = HeadedNode(role, path, folder)  # type: ignore[assignment]
        cluster.announce()
        cluster.wait_ready()
        body = {
            "model": "fake", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True, "hidden_states": "one",
        }  # fmt: skip
        with cluster.new_client() as client:
            answer = client.post("/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected.tokens

        counters = cluster.nodes["decode-0"].node.status().counters  # type: ignore[attr-defined]
        assert counters.prompt_tokens_computed == 0, "it came from the prefill node"
        assert counters.speculative_accepted == counters.speculative_drafted >= OUTPUT_TOKENS // 2
        written = folder / "one.safetensors"
        until(written.exists)
        found = load_file(written)
        assert found["token_ids"].tolist() == prompt
        assert found["routed_layers"].tolist() == [1], "the first layer has no experts"
        assert found["routed_experts"].shape == (len(prompt), 1, 2)
