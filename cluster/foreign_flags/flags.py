"""The flags of vLLM and SGLang, and what each becomes here.

A flag sets a setting, or asks for what is always so, or is refused with a sentence that names the alternative. No flag is accepted without
effect. docs/from-vllm.md shows the table; a test compares the two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Assignment = tuple[str, str]
"""A setting's name and its value as text."""

Convert = Callable[[list[str]], list[Assignment]]


class RefusedValue(ValueError):
    """Says what is wrong with a flag's value. Not a ConfigurationError, because `--help` reads this module and must not import it."""


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """The flag sets settings."""

    settings: tuple[str, ...]
    convert: Convert
    note: str = ""


@dataclass(frozen=True, slots=True)
class StandingFlag:
    """What the flag asks for is always so. With `values`, only for those; another value is refused with `note`."""

    note: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """The flag is refused; `note` says what to do instead."""

    note: str


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    becomes: SettingFlag | StandingFlag | UnsupportedFlag
    nargs: int | str | None = None  # as in argparse: 0 is a switch, None takes one value


def sets(setting: str, words: dict[str, str] | None = None, note: str = "") -> SettingFlag:
    """The flag's value becomes the setting's, translated by `words` where it is in there."""
    translated = words or {}
    return SettingFlag((setting,), lambda values: [(setting, translated.get(values[0], values[0]))], note)


def sets_all(settings: tuple[str, ...]) -> SettingFlag:
    """The flag's value becomes the value of each of the settings."""
    return SettingFlag(settings, lambda values: [(setting, values[0]) for setting in settings])


def switches(setting: str, value: str) -> SettingFlag:
    return SettingFlag((setting,), lambda _: [(setting, value)], f"`{setting}={value}`")


def _thousands(values: list[str]) -> list[Assignment]:
    """vLLM writes lengths as 32k (32,000), 32K (32,768) or -1 and auto (what fits)."""
    text = values[0]
    factor = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(text[-1:], 0)
    if text in ("auto", "-1"):
        text = "null"
    elif factor and text[:-1].replace(".", "", 1).isdigit():
        text = str(int(float(text[:-1]) * factor))
    return [("scheduler.max_model_len", text)]


def _names(values: list[str]) -> list[Assignment]:
    named = [("model.served_name", values[0])]
    return [*named, ("router.model_aliases", json.dumps(values[1:]))] if values[1:] else named


def _offloading(values: list[str]) -> list[Assignment]:
    """vLLM's value is in GiB."""
    return [("cache.tiers", json.dumps([{"cpu": f"{values[0]}GiB"}]))]


def _keys(values: list[str]) -> list[Assignment]:
    from tandem.router.config import name_of_key  # here: `--help` reads this module, and that import takes time

    keys = [{"name": name_of_key(key), "key": key} for key in values]
    return [("router.api_keys", json.dumps(keys))]


def _adapters(values: list[str]) -> list[Assignment]:
    """Each value is NAME=FOLDER, or an object with `name` and `path`."""
    adapters: dict[str, str] = {}
    for value in values:
        name, _, place = value.partition("=")
        if value[:1] == "{":
            try:
                described = json.loads(value)
                name, place = str(described["name"]), str(described["path"])
            except (ValueError, KeyError, TypeError):
                name, place = value, ""
        adapters[name] = place
    return [("model.adapters", json.dumps(adapters))]


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise RefusedValue(f"is not a JSON object: {text[:80]!r}") from None


def _speculation(values: list[str]) -> list[Assignment]:
    """The value is an object with `num_speculative_tokens`, and `model` for a draft model; `method` chooses between the ways to guess.
    A model's own head has many methods' names: vLLM has one for each kind of model, such as `deepseek_mtp`."""
    described = _object(values[0])
    model, count = described.pop("model", None), described.pop("num_speculative_tokens", None)
    method = described.pop("method", "draft_model" if model else "ngram")
    if str(method).endswith("mtp"):
        method = model = "mtp"
    if method not in ("ngram", "draft_model", "eagle", "eagle3", "mtp"):
        raise RefusedValue(f"`method` must be `ngram`, `draft_model`, `eagle`, `eagle3` or `mtp`, not {method!r}")
    if described:
        raise RefusedValue(f"has {', '.join(map(repr, described))}, which Tandem does not read: leave it out")
    if method != "ngram" and not model:
        raise RefusedValue("needs `model`, the draft model or head")
    if count is None:
        raise RefusedValue("needs `num_speculative_tokens`")
    draft = [("model.draft", str(model))] if method != "ngram" else []
    return [("scheduler.num_speculative_tokens", str(count)), *draft]


_NOT_OURS = ("hwm", "max_queue_size")  # sizes of vLLM's own queues


def _events(values: list[str]) -> list[Assignment]:
    """The value is an object, as of vLLM's KVEventsConfig."""
    described = _object(values[0])
    is_on = bool(described.pop("enable_kv_cache_events", False))
    publisher = described.pop("publisher", None) or ("zmq" if is_on else "null")
    if publisher not in ("zmq", "null"):
        raise RefusedValue(f"`publisher` must be `zmq` or `null`, not {publisher!r}")
    for name in _NOT_OURS:
        if name in described:
            raise RefusedValue(f"has {name!r}, a size of vLLM's own queues: leave it out")
    unknown = described.keys() - {"endpoint", "replay_endpoint", "topic"}
    if unknown:
        raise RefusedValue(f"has {', '.join(map(repr, sorted(unknown)))}, which Tandem does not read: leave it out")
    if not is_on or publisher == "null":
        return []
    if "endpoint" not in described:
        raise RefusedValue("needs `endpoint`, tcp://ADDRESS:PORT: nothing is published on every interface by default")
    return [(f"cache.events.{name}", str(value)) for name, value in described.items() if value is not None]


_RUNNER = (
    "a model generates text, and makes vectors where its files or model.pooling say how; there is no classification"
)
_OTHER_WAYS = (
    "several devices share a model by `--tensor-parallel-size N` and `--pipeline-parallel-size N`; for more throughput give a pool more nodes "
    "with --prefill N and --decode N, or --aggregated N"
)
_WIDTHS = tuple(f"pools.{pool}.tensor_parallel" for pool in ("prefill", "decode", "aggregated"))
_STAGES = tuple(f"pools.{pool}.pipeline_parallel" for pool in ("prefill", "decode", "aggregated"))
_CONTEXTS = tuple(f"pools.{pool}.context_parallel" for pool in ("prefill", "aggregated"))
_POOLS = "give each pool its nodes: --prefill N and --decode N, or --aggregated N for nodes that do both"
_SAMPLING = {"auto": "model", "vllm": "openai"}
# Names of parsers in vLLM and SGLang whose format has another name here.
TOOL_FORMATS = {
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "openai": "harmony",
    "gpt-oss": "harmony",
    "minimax": "minimax_m1",
    "minimax_m2": "minimax",
    "minimax-m2": "minimax",
    "phi4_mini_json": "phi4",
    "functiongemma": "function_gemma",
}
REASONING_FORMATS = {
    **dict.fromkeys(("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "qwen3", "glm45"), "think"),
    **dict.fromkeys(("kimi_k2", "minimax_m2", "olmo3"), "think"),
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
    "seed_oss": "seed_think",
    "kimi": "kimi",
}

VLLM: tuple[Flag, ...] = (
    # the model
    Flag(("--model-path",), sets("model.path")),
    Flag(("--served-model-name",), SettingFlag(("model.served_name", "router.model_aliases"), _names), "+"),
    Flag(("--revision",), sets("model.revision")),
    Flag(("--max-model-len", "--context-length"), SettingFlag(("scheduler.max_model_len",), _thousands)),
    Flag(("--dtype",), sets("model.dtype", {"half": "float16", "float": "float32"})),
    Flag(("--tokenizer",), UnsupportedFlag("the tokenizer is the one in the model's folder: put the other one there")),
    Flag(("--trust-remote-code",), UnsupportedFlag("code that comes with a checkpoint is never run: use a model of a type that transformers knows"), 0),
    Flag(("--quantization", "-q"), UnsupportedFlag("the checkpoint's config.json says how it is quantized: leave the flag out")),
    Flag(("--load-format",), StandingFlag("weights are read from safetensors or GGUF files", ("auto", "safetensors", "gguf"))),
    Flag(("--tokenizer-mode", "--config-format"), StandingFlag("files are read in Hugging Face's format", ("auto", "hf"))),
    Flag(("--tokenizer-revision", "--code-revision"), UnsupportedFlag("use `--revision`, which holds for all files of a model")),
    Flag(("--hf-overrides", "--rope-scaling", "--rope-theta"), UnsupportedFlag("put a config.json with the other values into the model's folder")),
    Flag(("--download-dir",), UnsupportedFlag("set HF_HOME for models of the Hugging Face hub, TANDEM_CACHE for the others")),
    Flag(("--hf-token",), UnsupportedFlag("set HF_TOKEN in the environment"), "?"),
    Flag(("--runner", "--task"), StandingFlag(_RUNNER, ("auto", "generate", "pooling", "embed"))),
    Flag(("--enable-lora",), StandingFlag("`--max-loras N` turns adapters on, and says how many one step may have"), 0),
    Flag(("--is-embedding",), UnsupportedFlag(_RUNNER), 0),
    Flag(("--convert",), StandingFlag(_RUNNER, ("auto", "none", "embed"))),
    Flag(("--max-loras", "--max-loras-per-batch"), sets("scheduler.max_loras")),
    Flag(("--max-lora-rank",), sets("model.max_lora_rank")),
    Flag(("--lora-modules", "--lora-paths"), SettingFlag(("model.adapters",), _adapters, "`model.adapters`: NAME=FOLDER each, with `--max-loras`"), "+"),
    Flag(("--limit-mm-per-prompt",), UnsupportedFlag("set `router.limits.images_per_request`; there is no audio")),
    Flag(("--enable-prompt-embeds",), switches("router.prompt_embeds", "true"), 0),
    Flag(("--language-model-only",), StandingFlag("the model reads text as usual; its vision tower is loaded, and costs only memory"), 0),
    # memory and the scheduler
    Flag(
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        sets("cache.memory_share", note="the KV cache's share of the memory that is free once the weights are loaded"),
    ),
    Flag(("--kv-cache-memory-bytes", "--kv-cache-memory"), sets("cache.memory_bytes")),
    Flag(("--kv-cache-dtype",), sets("cache.dtype", {"fp8_e4m3": "fp8"})),
    Flag(("--num-gpu-blocks-override", "--max-total-tokens"), UnsupportedFlag("the KV cache is sized in bytes: --kv-memory SIZE, such as 4GiB")),
    Flag(("--block-size", "--page-size"), sets("cache.block_size")),
    Flag(("--enable-prefix-caching",), switches("cache.prefix_caching", "true"), 0),
    Flag(("--no-enable-prefix-caching", "--disable-radix-cache"), switches("cache.prefix_caching", "false"), 0),
    Flag(("--prefix-caching-hash-algo",), sets("cache.hash_algorithm")),
    Flag(("--max-num-seqs", "--max-running-requests"), sets("scheduler.max_num_seqs")),
    Flag(("--max-num-batched-tokens", "--chunked-prefill-size"), sets("scheduler.max_num_batched_tokens")),
    Flag(("--enable-chunked-prefill",), switches("scheduler.chunked_prefill", "true"), 0),
    Flag(("--no-enable-chunked-prefill",), switches("scheduler.chunked_prefill", "false"), 0),
    Flag(("--long-prefill-token-threshold",), sets("scheduler.long_prefill_token_threshold")),
    Flag(("--scheduling-policy", "--schedule-policy"), sets("scheduler.policy")),
    Flag(("--async-scheduling",), switches("scheduler.async_scheduling", "always"), 0),
    Flag(("--no-async-scheduling", "--disable-overlap-schedule"), switches("scheduler.async_scheduling", "never"), 0),
    Flag(
        ("--speculative-config",),
        SettingFlag(
            ("scheduler.num_speculative_tokens", "model.draft"), _speculation, "methods `ngram`, `draft_model`, `eagle`, `eagle3` and `mtp`"
        ),
    ),
    Flag(("--num-speculative-tokens",), sets("scheduler.num_speculative_tokens")),
    Flag(("--kv-offloading-size",), SettingFlag(("cache.tiers",), _offloading, "for each node")),
    Flag(("--cpu-offload-gb",), UnsupportedFlag("weights stay on the device: leave the flag out")),
    Flag(("--enable-hierarchical-cache",), UnsupportedFlag("KV is kept in host memory by cache.tiers: --set 'cache.tiers=[{cpu: 4GiB}]'"), 0),
    Flag(
        ("--kv-events-config",),
        SettingFlag(
            tuple(f"cache.events.{name}" for name in ("endpoint", "replay_endpoint", "topic")),
            _events,
            "the `endpoint` names an address of this machine, not `*`",
        ),
    ),
    Flag(("--swap-space",), UnsupportedFlag("KV is kept in host memory by cache.tiers: --set 'cache.tiers=[{cpu: 4GiB}]'")),
    Flag(("--enforce-eager", "--disable-cuda-graph"), UnsupportedFlag("on GPUs decode steps are always captured as CUDA graphs: leave the flag out"), 0),
    Flag(("--compilation-config", "--optimization-level"), UnsupportedFlag("models are not compiled: leave the flag out")),
    Flag(
        ("--attention-backend",),
        UnsupportedFlag("the device decides: FlashInfer on GPUs where it is installed, Tandem's kernels on CPUs: leave the flag out"),
    ),
    Flag(
        ("--guided-decoding-backend", "--grammar-backend", "--structured-outputs-config"),
        UnsupportedFlag("llguidance enforces every grammar: leave the flag out"),
    ),
    Flag(("--seed", "--random-seed"), UnsupportedFlag("each request has its own `seed`, or gets a fresh one from the router: leave the flag out")),
    # devices and machines
    Flag(("--tensor-parallel-size", "-tp", "--tp", "--tp-size"), sets_all(_WIDTHS)),
    Flag(("--pipeline-parallel-size", "-pp", "--pp-size"), sets_all(_STAGES)),
    Flag(("--prefill-context-parallel-size", "-pcp"), sets_all(_CONTEXTS)),
    Flag(
        ("--decode-context-parallel-size", "-dcp"),
        StandingFlag("the KV of a decode node is shared by heads, not by tokens: --tensor-parallel-size N", ("1",)),
    ),
    Flag(("--data-parallel-size", "-dp", "--dp-size"), StandingFlag(_POOLS, ("1",))),
    Flag(("--enable-dp-attention",), UnsupportedFlag(_POOLS), 0),
    Flag(("--ep-size", "--ep"), StandingFlag(_OTHER_WAYS, ("1",))),
    Flag(("--enable-expert-parallel",), UnsupportedFlag(_OTHER_WAYS), 0),
    Flag(("--distributed-executor-backend",), StandingFlag("Ray places every node", ("ray",))),
    Flag(("--worker-use-ray",), StandingFlag("Ray places every node"), 0),
    Flag(
        ("--nnodes", "--node-rank", "--dist-init-addr", "--master-addr"),
        UnsupportedFlag("machines join a Ray cluster (`ray up`, or `ray start`), and `tandem serve --address auto` there uses all of them"),
    ),
    Flag(("--headless",), UnsupportedFlag(f"only the router has an HTTP API: {_POOLS}"), 0),
    Flag(("--device",), sets("model.device")),
    Flag(
        ("--kv-transfer-config",),
        UnsupportedFlag(
            f"prefill and decode are pools here: {_POOLS}; `--set transfer.connector=...` chooses how the KV cache travels"
        ),
    ),
    Flag(("--disaggregation-mode",), UnsupportedFlag(_POOLS)),
    # the server
    Flag(("--host",), sets("router.host")),
    Flag(("--port",), sets("router.port")),
    Flag(("--api-key",), SettingFlag(("router.api_keys",), _keys, "each key is a tenant, named after its digest"), "+"),
    Flag(("--allowed-origins",), sets("router.cors_origins")),
    Flag(("--api-server-count",), sets("router.processes")),
    Flag(("--ssl-certfile",), sets("router.tls_certificate")),
    Flag(("--ssl-keyfile",), sets("router.tls_key")),
    Flag(("--enable-ssl-refresh",), StandingFlag("a changed certificate is loaded while the router serves"), 0),
    Flag(
        ("--ssl-ca-certs", "--ssl-cert-reqs"),
        UnsupportedFlag("clients show keys, not certificates: put a proxy that checks certificates in front of the router"),
    ),
    Flag(("--enable-log-requests",), UnsupportedFlag("the router's log has one line for each request, without its prompt: leave the flag out"), 0),
    Flag(("--disable-log-requests", "--no-enable-log-requests"), StandingFlag("the router's log has one line for each request, without its prompt"), 0),
    Flag(("--log-level", "--uvicorn-log-level"), sets("logs.level")),
    Flag(("--root-path",), UnsupportedFlag("let the proxy strip its own prefix: the router's paths begin with /v1")),
    Flag(("--otlp-traces-endpoint",), sets("router.tracing.otlp_endpoint", note="over HTTP, such as http://collector:4318")),
    Flag(("--enable-request-id-headers",), StandingFlag("every answer has its x-request-id"), 0),
    Flag(("--disable-log-stats",), StandingFlag("statistics are in /metrics, not in the log"), 0),
    Flag(("--enable-metrics",), StandingFlag("every router has /metrics"), 0),
    Flag(("--enable-server-load-tracking",), StandingFlag("every router has /load"), 0),
    Flag(("--enable-prompt-tokens-details",), StandingFlag("usage says how many of a prompt's tokens were cached"), 0),
    Flag(("--enable-force-include-usage",), switches("router.include_usage", "true"), 0),
    Flag(("--stream-interval",), StandingFlag("each token is sent as it comes", ("1",))),
    # the API
    Flag(("--max-logprobs",), StandingFlag("a token has up to 20 alternatives, as with OpenAI", ("20",))),
    Flag(
        ("--override-generation-config",),
        UnsupportedFlag("edit the model's generation_config.json, or ignore it with `--set router.sampling_defaults=openai`"),
    ),
    Flag(("--chat-template-content-format",), StandingFlag("found in the chat template", ("auto",))),
    Flag(("--default-chat-template-kwargs",), UnsupportedFlag("send them with each request, as `chat_template_kwargs`")),
    Flag(
        ("--tool-parser-plugin", "--reasoning-parser-plugin", "--logits-processors", "--middleware"),
        UnsupportedFlag("Tandem loads no code by a flag: leave the flag out"),
    ),
    Flag(("--chat-template",), sets("router.chat_template")),
    Flag(("--generation-config", "--sampling-defaults"), sets("router.sampling_defaults", _SAMPLING)),
    Flag(("--enable-auto-tool-choice",), StandingFlag("a request that brings tools gets `tool_choice: auto`"), 0),
    Flag(("--tool-call-parser",), sets("router.tool_format", TOOL_FORMATS, "not needed: the format is found in the chat template")),
    Flag(("--reasoning-parser",), sets("router.reasoning_format", REASONING_FORMATS, "not needed: the format is found in the chat template")),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser, besides: Collection[str]) -> None:
    """Adds every flag of the table that the parser does not have yet. --help does not list them; docs/from-vllm.md does."""
    for flag in VLLM:
        names = [name for name in flag.names if name not in besides]
        if names:
            parser.add_argument(
                *names,
                action=_ForeignFlags,
                dest="foreign",
                nargs=flag.nargs,
                flag=flag,
                default=[],
                help=argparse.SUPPRESS,
            )


class _ForeignFlags(argparse.Action):
    """Collects (flag, its name as typed, its values) in the order typed."""

    def __init__(self, *args: Any, flag: Flag, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        listed = values if isinstance(values, list) else [] if values is None else [values]
        given = [*getattr(namespace, self.dest), (self._flag, option or self._flag.names[0], listed)]
        setattr(namespace, self.dest, given)


def translated(name: str, value: str) -> list[Assignment]:
    """Returns what a flag that Tandem and vLLM share sets, if the value is in vLLM's words; [] for other flags."""
    for flag in VLLM:
        if name in flag.names and isinstance(flag.becomes, SettingFlag):
            return flag.becomes.convert([value])
    return []


def read_flags(given: Sequence[tuple[Flag, str, list[str]]]) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """Returns the assignments, as (setting, text, origin), and a sentence for each flag that is refused."""
    assignments: list[tuple[str, str | None, str]] = []
    answers: list[str] = []
    for flag, name, values in given:
        match flag.becomes:
            case SettingFlag(convert=convert):
                try:
                    assignments += [(setting, text, name) for setting, text in convert(values)]
                except RefusedValue as error:
                    answers.append(f"{name}: {error}")
            case StandingFlag(note=note, values=held):
                if held is not None and values[0] not in held:
                    answers.append(f"{name} {values[0]}: {note}")
            case UnsupportedFlag(note=note):
                answers.append(f"{name}: {note}")
    return assignments, answers


def table() -> Iterator[str]:
    """Yields the lines of the table in Markdown."""
    yield "| vLLM, SGLang | Tandem |"
    yield "|---|---|"
    for flag in VLLM:
        yield f"| {', '.join(f'`{name}`' for name in flag.names)} | {_shown(flag.becomes)} |"


def _shown(becomes: SettingFlag | StandingFlag | UnsupportedFlag) -> str:
    match becomes:
        case SettingFlag(settings=settings, note=note):
            if note.startswith("`"):
                return f"sets {note}"
            return f"sets {', '.join(f'`{name}`' for name in settings)}{': ' + note if note else ''}"
        case StandingFlag(note=note, values=None):
            return f"already so: {note}"
        case StandingFlag(note=note, values=held):
            return f"{', '.join(f'`{value}`' for value in held or ())} only: {note}"
        case UnsupportedFlag(note=note):
            return f"not taken: {note}"
