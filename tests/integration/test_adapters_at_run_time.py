"""Adapters are loaded and unloaded while a prefill and a decode node serve, under Ray; their text is PEFT's merged model's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tests.engine.model.adapter_files import loaded, save_adapter
from tests.integration.conftest import Deploy, LoopThread, float32_config
from tests.integration.reference import NEW_TOKENS, ExpectedAnswer, greedy_answers

_replace = msgspec.structs.replace


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    from peft import PeftModel
    from transformers import AutoTokenizer

    PeftModel.from_pretrained(loaded(model), adapter).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_adapters_come_and_go_on_both_sides_of_a_handover(
    deploy: Deploy, loop_thread: LoopThread, smollm2_path: Path, expected: list[ExpectedAnswer], tmp_path: Path
) -> None:
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    one, two = (save_adapter(smollm2_path, tmp_path / str(seed), seed, **options) for seed in (1, 2))
    asked = expected[4]
    texts = [
        greedy_answers(merged(smollm2_path, folder, tmp_path / f"{folder.name}-merged"), [asked.prompt])[0].text
        for folder in (one, two)
    ]
    assert len({asked.text, *texts}) == 3
    base = float32_config(smollm2_path, prefill=1, decode=1)
    config = _replace(base, scheduler=_replace(base.scheduler, max_loras=2))
    with deploy(config) as server:

        def change(load: dict[str, str], unload: list[str]) -> dict[str, str]:
            return loop_thread.run(server.deployment.control.adapters(load, unload))

        def answer(model: str) -> str:
            return server.complete(asked.prompt, NEW_TOKENS, model=model)["choices"][0]["text"]

        def names() -> set[str]:
            return {card["id"] for card in server.http.get("/v1/models").json()["data"]}

        assert answer("smollm2") == asked.text
        assert change({"tuned": str(one)}, []) == {"tuned": str(one)}
        assert names() == {"smollm2", "tuned"}
        assert answer("tuned") == texts[0]
        change({"tuned": str(two), "first": str(one)}, [])
        assert [answer("tuned"), answer("first")] == texts[::-1], "the name has other weights, and no old KV"
        with pytest.raises(ConfigurationError, match="is no adapter"):
            change({"bad": str(smollm2_path)}, ["tuned"])
        assert change({}, ["tuned"]) == {"first": str(one)}
        assert names() == {"smollm2", "first"}
        gone = server.http.post("/v1/completions", json={"model": "tuned", "prompt": "x", "max_tokens": 1})
        assert gone.status_code == 404
        assert answer("first") == texts[0]
        assert answer("smollm2") == asked.text
        server.until_quiet()
        assert server.counters("decode")["prompt_tokens_received"] > 0
