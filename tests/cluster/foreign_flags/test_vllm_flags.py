"""Flags of vLLM and SGLang either take effect or get an answer that says what to use."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.api.settings import ReasoningName, ToolFormat
from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands.setting_options import read_settings
from tandem.cluster.config import TandemConfig
from tandem.cluster.foreign_flags.flags import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    VLLM,
    Flag,
    SettingFlag,
    StandingFlag,
    table,
)
from tandem.cluster.settings.combined import Settings, SettingsError
from tandem.router.config import name_of_key

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from-vllm.md"


@pytest.fixture(autouse=True)
def _no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@functools.cache
def parser() -> argparse.ArgumentParser:
    return make_parser()


def read(*arguments: str) -> Settings:
    return read_settings(parser().parse_args(["serve", *arguments]))


def config_of(*arguments: str) -> TandemConfig:
    return read(*arguments).config


def value_of(config: TandemConfig, setting: str) -> Any:
    value: Any = config
    for name in setting.split("."):
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else msgspec.to_builtins(value)


COMMANDS: list[tuple[Sequence[str], dict[str, object]]] = [
    (["--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}'],
     {"cache.events.endpoint": "tcp://127.0.0.1:5557", "cache.events.topic": "kv"}),
    (["--kv-events-config", '{"publisher": "null"}'], {"cache.events.endpoint": ""}),
    (["--enable-force-include-usage"], {"router.include_usage": True}),
    (["Qwen/Qwen3-8B"], {"model.path": "Qwen/Qwen3-8B"}),
    (["--port", "9", "Qwen/Qwen3-8B", "--prefill", "2"], {"model.path": "Qwen/Qwen3-8B", "router.port": 9}),
    (["--max-model-len", "32k"], {"scheduler.max_model_len": 32_000}),
    (["--max-model-len", "32K"], {"scheduler.max_model_len": 32_768}),
    (["--max-model-len", "auto"], {"scheduler.max_model_len": None}),
    (["--context-length", "4096"], {"scheduler.max_model_len": 4096}),
    (["--gpu-memory-utilization", "0.9"], {"cache.memory_share": 0.9}),
    (["--mem-fraction-static=0.8"], {"cache.memory_share": 0.8}),
    (["--dtype", "half"], {"model.dtype": "float16"}),
    (["--dtype", "bfloat16"], {"model.dtype": "bfloat16"}),
    (["--served-model-name", "a"], {"model.served_name": "a", "router.model_aliases": []}),
    (["--served-model-name", "a", "b", "c"], {"model.served_name": "a", "router.model_aliases": ["b", "c"]}),
    (["--max-num-seqs", "64"], {"scheduler.max_num_seqs": 64}),
    (["--max-num-batched-tokens", "8192"], {"scheduler.max_num_batched_tokens": 8192}),
    (["--no-enable-prefix-caching"], {"cache.prefix_caching": False}),
    (["--enable-prefix-caching"], {"cache.prefix_caching": True}),
    (["--prefix-caching-hash-algo", "xxhash"], {"cache.hash_algorithm": "xxhash"}),
    (["--tool-call-parser", "llama3_json", "--enable-auto-tool-choice"], {"router.tool_format": "llama3"}),
    (["--allowed-origins", '["https://a.example"]'], {"router.cors_origins": ["https://a.example"]}),
    (["-tp", "2"], {f"pools.{pool}.tensor_parallel": 2 for pool in ("prefill", "decode", "aggregated")}),
    (["-pp", "2"], {f"pools.{pool}.pipeline_parallel": 2 for pool in ("prefill", "decode", "aggregated")}),
    (["-pcp", "2", "-dcp", "1"], {f"pools.{pool}.context_parallel": 2 for pool in ("prefill", "aggregated")}),
    (["-tp", "1", "--tensor-parallel-size", "1", "--distributed-executor-backend", "ray"], {}),
    (["--tool-call-parser", "qwen3_xml"], {"router.tool_format": "qwen3_coder"}),
    (["--reasoning-parser", "deepseek_r1"], {"router.reasoning_format": "think"}),
    (["--reasoning-parser", "mistral"], {"router.reasoning_format": "mistral"}),
    (["--model", "a/b", "--revision", "v1"], {"model.revision": "v1"}),
    (["--generation-config", "vllm"], {"router.sampling_defaults": "openai"}),
    (["--chat-template", "t.jinja"], {"router.chat_template": "t.jinja"}),
    (["--model-path", "a/b", "--log-level", "debug"], {"model.path": "a/b", "logs.level": "debug"}),
    (["--num-speculative-tokens", "3"], {"scheduler.num_speculative_tokens": 3}),
    (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}'],
     {"scheduler.num_speculative_tokens": 5, "model.draft": ""}),
    (["--speculative-config", '{"model": "a/small", "num_speculative_tokens": 2}'],
     {"scheduler.num_speculative_tokens": 2, "model.draft": "a/small"}),
    (["--speculative-config", '{"method": "eagle", "model": "a/head", "num_speculative_tokens": 2}'],
     {"scheduler.num_speculative_tokens": 2, "model.draft": "a/head"}),
    (["--speculative-config", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'],
     {"scheduler.num_speculative_tokens": 1, "model.draft": "mtp"}),
    (["--enable-prompt-embeds"], {"router.prompt_embeds": True}),
    (["--disable-log-requests", "--disable-log-stats", "--enable-metrics"], {}),
    (["--otlp-traces-endpoint", "http://c:4318"], {"router.tracing.otlp_endpoint": "http://c:4318"}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), COMMANDS, ids=lambda given: " ".join(map(str, given)))
def test_a_flag_of_vllm_reaches_the_setting(arguments: list[str], expected: dict[str, object]) -> None:
    config = config_of(*arguments)
    assert {name: value_of(config, name) for name in expected} == expected


def test_api_keys_become_tenants() -> None:
    keys = config_of("--api-key", "one", "two").router.api_keys
    assert [(key.name, key.key) for key in keys] == [(name_of_key("one"), "one"), (name_of_key("two"), "two")]
    assert config_of("--api-key", "two").router.api_keys == keys[1:], "its name depends on no other key"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ep-size", "2"], "--ep-size 2: several devices share a model by `--tensor-parallel-size N`"),
        (["--trust-remote-code"], "--trust-remote-code: code that comes with a checkpoint is never run"),
        (["--data-parallel-size", "2"], "--prefill N and --decode N, or --aggregated N"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype: cache.dtype must be"),
        (["--speculative-config", '{"method": "medusa", "model": "a/head", "num_speculative_tokens": 2}'],
         "--speculative-config: `method` must be `ngram`, `draft_model`, `eagle`, `eagle3` or `mtp`, not 'medusa'"),
        (["--speculative-config", '{"model": "a/b", "num_speculative_tokens": 2, "prompt_lookup_max": 4}'],
         "--speculative-config: has 'prompt_lookup_max', which Tandem does not read"),
        (["--speculative-config", '{"model": "a/b"}'], "--speculative-config: needs `num_speculative_tokens`"),
        (["--kv-events-config", "zmq"], "--kv-events-config: is not a JSON object: 'zmq'"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "--kv-events-config: needs `endpoint`"),
        (["--kv-events-config", '{"hwm": 5}'], "--kv-events-config: has 'hwm', a size of vLLM's own queues"),
        (["--speculative-config", "eagle"], "--speculative-config: is not a JSON object: 'eagle'"),
        (["--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 2}'],
         "--speculative-config: needs `model`, the draft model or head"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization: cache.memory_share must be"),
        (["a/b", "--model", "c/d"], "MODEL a/b and --model c/d name two models"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_answered(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        config_of(*arguments)
    assert sentence in str(raised.value)


def test_all_answers_come_at_once_beside_other_mistakes() -> None:
    with pytest.raises(SettingsError) as raised:
        config_of("--ep-size", "2", "--trust-remote-code", "--port", "x", "--set", "router.prot=1")
    assert len(raised.value.mistakes) == 4


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--max_model_len=5", "; did you mean --max-model-len?"),
        ("--prefil=5", "; did you mean --prefill?"),
        ("--disable-custom-all-reduce", ": `--set SETTING=VALUE` reaches every setting"),
    ],
)
def test_an_unknown_flag_says_which_was_meant_or_how_settings_are_set(
    capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", typed])
    assert f"there is no {typed}{said}" in capsys.readouterr().err


def test_every_format_of_the_table_is_one_that_there_is() -> None:
    assert set(TOOL_FORMATS.values()) <= set(ToolFormat)
    assert set(REASONING_FORMATS.values()) <= set(ReasoningName)


# A value that each flag takes, or each flag with this setting; one that is not here takes "2".
TAKEN = {
    "--kv-events-config": ['{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'],
    "--speculative-config": ['{"method": "ngram", "num_speculative_tokens": 2}'],
    "model.path": ["a/b"], "model.served_name": ["a", "b"], "model.revision": ["v1"], "model.dtype": ["half"],
    "model.adapters": ["sql=./sql"], "model.device": ["cpu"], "cache.memory_share": ["0.5"], "cache.memory_bytes": ["1GiB"],
    "cache.dtype": ["fp8_e4m3"], "cache.hash_algorithm": ["xxhash"], "scheduler.policy": ["priority"], "router.host": ["0.0.0.0"],
    "router.api_keys": ["secret"], "router.cors_origins": ['["*"]'], "router.tls_certificate": ["c.pem"], "router.tls_key": ["k.pem"],
    "logs.level": ["debug"], "router.tracing.otlp_endpoint": ["http://collector:4318"], "router.chat_template": ["t.jinja"],
    "router.sampling_defaults": ["vllm"], "router.tool_format": ["hermes"], "router.reasoning_format": ["qwen3"],
}  # fmt: skip
BESIDE = {
    "model.adapters": ["--max-loras", "2"],
    "router.tls_certificate": ["--ssl-keyfile", "k.pem"],
    "router.tls_key": ["--ssl-certfile", "c.pem"],
    "pools.prefill.tensor_parallel": ["--prefill", "1"],
}


@pytest.mark.parametrize("flag", VLLM, ids=lambda flag: flag.names[0])
def test_no_flag_is_taken_without_effect(flag: Flag) -> None:
    """Each of its names is taken by the parser, and does what its row says."""
    for name in flag.names:
        match flag.becomes:
            case SettingFlag(settings=(setting, *_)):
                values = [] if flag.nargs == 0 else TAKEN.get(name, TAKEN.get(setting, ["2"]))
                found = read(name, *values, *BESIDE.get(setting, []))
                assert found.origins[tuple(setting.split("."))] == name
            case StandingFlag(values=values):
                read(name, *([] if flag.nargs == 0 else (values or ("2",))[:1]))
            case _:
                with pytest.raises(SettingsError) as raised:
                    read(name, *([] if flag.nargs == 0 else ["2"]))
                assert any(
                    mistake.startswith(f"{name}") and flag.becomes.note in mistake for mistake in raised.value.mistakes
                )


def test_the_page_shows_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8"), (
        "docs/from-vllm.md differs from cluster/foreign_flags/flags.py: put what `table()` yields into it"
    )


def test_adapters_are_taken_in_both_of_vllms_writings() -> None:
    config = config_of(
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "32",
        "--lora-modules", "sql=./sql", '{"name": "law", "path": "./law", "base_model_name": "m"}',
    )  # fmt: skip
    assert config.model.adapters == {"sql": "./sql", "law": "./law"}
    assert (config.scheduler.max_loras, config.model.max_lora_rank) == (2, 32)


@pytest.mark.parametrize(
    ("modules", "says"),
    [("sql", "must say where 'sql' is"), ("a b=./x", "a name is of letters"), ("sql=./x", "needs scheduler.max_loras")],
)
def test_wrong_adapters_are_refused(modules: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        config_of("--lora-modules", modules)
