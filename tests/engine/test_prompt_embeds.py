"""Prompts of embeddings get the answers of transformers' `generate(inputs_embeds=...)`: on the native and on the general path, in any
chunks, with and without a cached prefix, after preemptions, continued on another node, and across a transfer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.embeds import PLACEHOLDER, PromptEmbeds
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 8
LENGTHS = [1, 5, 16, 23, 61]


def embeds_of(rows: torch.Tensor) -> PromptEmbeds:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(str(rows.dtype).removeprefix("torch."), rows.shape[1], data)


def expected(path: Path, prompts: list[torch.Tensor], **options: Any) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    answers: list[list[int]] = []
    for rows in prompts:
        mask = torch.ones(1, len(rows), dtype=torch.int64)
        found = model.generate(
            inputs_embeds=rows[None].float(), attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS,
            pad_token_id=0, **options
        )  # fmt: skip
        answers.append(found[0].tolist())
    return answers


@dataclasses.dataclass
class Lab:
    path: Path
    prompts: dict[str, torch.Tensor]
    answers: dict[str, list[int]]

    def start(
        self,
        transfer: TransferConfig | None = None,
        name: str = "n",
        *,
        batched: int = 64,
        caching: bool = False,
        **scheduling: Any,
    ) -> OneEngine:
        made = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=batched, **scheduling)
        return OneEngine.start(
            self.path, name, 4, transfer, scheduler=made, memory_bytes=4 << 20, prefix_caching=caching
        )

    def add(self, engine: OneEngine, name: str, request_id: str | None = None, **options: Any) -> None:
        embeds = embeds_of(self.prompts[name])
        prompt = [PLACEHOLDER] * embeds.count
        engine.add(request_id or name, prompt, NEW_TOKENS, None, embeds=embeds, **options)


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3.5"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A model that the native library computes, one that transformers computes, and one with recurrent states."""
    path = tiny.save(request.param, tmp_path_factory.mktemp("embeds"))
    draw = torch.Generator().manual_seed(1)
    prompts = {str(length): torch.randn(length, 32, generator=draw) for length in LENGTHS}
    longest = prompts[str(LENGTHS[-1])]
    prompts["other end"] = torch.cat([longest[:40], torch.randn(9, 32, generator=draw)])
    return Lab(path, prompts, dict(zip(prompts, expected(path, list(prompts.values())), strict=True)))


@pytest.mark.parametrize(("kind", "native", "size"), [("llama", True, 32), ("gemma3n", False, 0)])
def test_the_library_reads_them_itself_and_models_that_ask_for_tokens_take_none(
    kind: str, native: bool, size: int, tmp_path: Path
) -> None:
    with Lab(tiny.save(kind, tmp_path), {}, {}).start() as engine:
        assert isinstance(engine.engine.runner.forward, NativeLlamaForward) == native  # type: ignore[attr-defined]
        assert engine.engine.runner.info.embed_size == size


@pytest.mark.parametrize(
    "scheduling",
    [
        {"batched": 7},
        *more([{"batched": 1}, {"batched": 64}]),
        pytest.param({"batched": 19, "async_scheduling": AsyncScheduling.ALWAYS}, id="planned ahead"),
        pytest.param({"batched": 19, "num_speculative_tokens": 3}, id="with drafts"),
    ],
    ids=str,
)
def test_any_chunks_beside_any_others(lab: Lab, scheduling: dict[str, Any]) -> None:
    tokens = [5, 9, 3, 77, 21, 8]
    with lab.start(**scheduling) as engine:
        for name in lab.prompts:
            lab.add(engine, name)
        engine.add("tokens", tokens, NEW_TOKENS, None)
        answers = engine.run_all()
        (of_tokens,) = tiny.reference(lab.path, [tokens], NEW_TOKENS)
        assert answers == {**lab.answers, "tokens": of_tokens.tokens}


def test_prompts_share_what_they_begin_with_and_nothing_else(lab: Lab) -> None:
    found = []
    with lab.start(caching=True) as engine:
        # All have the same placeholders.
        for name, request_id in [("61", "61"), ("23", "23"), ("61", "again"), ("other end", "other end")]:
            before = engine.engine.scheduler.stats().prompt_tokens_cached
            lab.add(engine, name, request_id)
            assert engine.run_all() == {request_id: lab.answers[name]}
            found.append(engine.engine.scheduler.stats().prompt_tokens_cached - before)
        assert found[:2] == [0, 0]
        if engine.engine.runner.info.state_blocks == 0:
            assert found[2:] == [60, 32]  # of 40, for a hash is over sixteen rows


def test_a_request_goes_on_elsewhere_with_its_tokens_so_far(lab: Lab) -> None:
    with lab.start(batched=10, caching=True) as engine:
        answer = lab.answers["23"]
        lab.add(engine, "23", output=answer[:3])
        assert engine.run_all() == {"23": answer[3:]}


def test_penalties_know_that_placeholders_were_not_said(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model: Any = tiny.build("llama")
    # The placeholder is likely here, so that it would be seen if it were punished.
    model.get_input_embeddings().weight.data[PLACEHOLDER] = torch.ones(32)
    model.save_pretrained(path)
    tries = torch.randn(200, 9, 32, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        first = model(inputs_embeds=tries).logits[:, -1].argmax(-1)
    rows = tries[first == PLACEHOLDER][0]
    (answer,) = expected(path, [rows], repetition_penalty=1.8)
    assert answer[0] == PLACEHOLDER
    lab = Lab(path, {"one": rows}, {"one": answer})
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, repetition_penalty=1.8)
    with lab.start() as engine:
        lab.add(engine, "one", sampling=sampling)
        assert engine.run_all() == {"one": answer}


def test_rows_of_fewer_bits_are_what_they_say(lab: Lab) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rows = lab.prompts["23"].to(dtype)
        some = Lab(lab.path, {"rows": rows}, dict(zip(["rows"], expected(lab.path, [rows]), strict=True)))
        with some.start() as engine:
            some.add(engine, "rows")
            assert engine.run_all() == some.answers


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, *more([False])])
def test_the_other_side_of_a_handover(lab: Lab, caching: bool) -> None:
    transfer = TransferConfig(connector="nixl")
    with (
        lab.start(transfer, "p", batched=20, caching=caching) as prefill,
        lab.start(transfer, "d", caching=caching) as decode,
    ):
        for turn in range(2):
            for name in ("61", "other end"):
                embeds = embeds_of(lab.prompts[name])
                prompt = [PLACEHOLDER] * embeds.count
                found = hand_over(prefill, decode, f"{name}/{turn}", prompt, NEW_TOKENS, embeds=embeds)
                assert found == lab.answers[name]
        assert decode.engine.scheduler.stats().prompt_tokens_computed == 0
