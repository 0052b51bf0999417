"""A model in a Python program, with a server of its own: real nodes, Ray and SmolLM2."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tandem import LLM, SamplingParams
from tests.integration.cluster_lab import END_S, START_S
from tests.waiting import until

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


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_cannot_say_so_leaves_no_process_behind_either(
    smollm2_path: Path, ending: signal.Signals
) -> None:
    """A notebook whose kernel is restarted, and a job whose time is over."""
    with subprocess.Popen([sys.executable, "-c", "from tandem import LLM; LLM('smollm2')"]) as process:
        program = psutil.Process(process.pid)
        until(lambda: program.children() != [], START_S)
        servers = program.children()
        process.send_signal(ending)
    _, alive = psutil.wait_procs(servers, timeout=END_S)
    for server in alive:
        server.kill()
    assert alive == []
