"""A model in a Python program, with a server of its own: real nodes, Ray and SmolLM2."""

from __future__ import annotations

from pathlib import Path

import psutil

from tandem import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_program_has_a_model_and_leaves_no_process_behind(smollm2_path: Path) -> None:
    ours = psutil.Process()
    before = {*ours.children()}
    with LLM("smollm2", prefill=1, decode=1, kv_memory="256MiB") as llm:
        texts = llm.generate(["The capital of France is", "One, two, three,"], GREEDY, use_tqdm=False)
        assert "Paris" in texts[0].outputs[0].text
        assert "four" in texts[1].outputs[0].text
        assert len(texts[0].outputs[0].token_ids) <= 12
        (chat,) = llm.chat(QUESTION, GREEDY)
        assert "Paris" in chat.outputs[0].text
        children = [*{*ours.children(recursive=True)} - before]
        assert len(children) > 3
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
