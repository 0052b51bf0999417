"""Every causal model class of the pinned transformers: tiny, with random weights, served as a checkpoint like any other.

`python -m tests.engine.model.every_class` runs them all and compares what comes of it with docs/models.md; `TYPE ...` runs some, and
`--write` writes the page's tables.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.own_attention.step import places_for
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.transformers_forward import TransformersForward
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
NUM_TOKENS = 6
LENGTHS = (1, 6, 21)
LAYERS = 4
# One class in this many is moved to another runner in the middle of a prompt, which loads it a second time
MOVED = 4
MOST_WEIGHTS = 20_000_000

# The names by which configurations call the sizes that make a model large. Each is set if a configuration has it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_intermediate_size", "expert_dim", "intermediate_size_mlp", "moe_ffn_hidden_size"), 24
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_latent_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_experts_per_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim",
                     "mamba_d_head", "mamba_head_dim", "mamba_headdim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 4),
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "lru_width": 32,
    "index_topk": 6,
    "index_head_dim": 16,
    # With few heads several tokens have a score of exactly 0, and which of them are picked is chance.
    "index_n_heads": 16,
    "sliding_window": 9,
    "attention_chunk_size": 9,
    "floor_scale": 4,
    "attention_window_size": 9,
    "vocab_size": tiny.VOCAB,
    "vocab_size_per_layer_input": tiny.VOCAB,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

# Further sizes for the classes whose sizes depend on each other in other ways.
BESIDES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "olmo_hybrid": {"linear_num_key_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    # With a window its `generate` answers otherwise than its own forward pass: no published model has one.
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 4, "sliding_window": None},
    # With a window its mask shows more than its cache keeps: no published model has one.
    "doge": {"sliding_window": None},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
        "index_topk": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4, "attention_head_dim": 16, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4, "attention_head_dim": 16, "num_mem_blocks": 1},
}  # fmt: skip
# An MLA model has as many heads of keys as of queries.
MLA = ("q_lora_rank", "kv_lora_rank")


class Outcome(msgspec.Struct, frozen=True):
    model_type: str
    verdict: Literal["served", "refused", "wrong", "crashed", "not built"]
    why: str = ""
    way: str = ""  # native, general, or general by its own code
    attending: int = 0  # layers, of LAYERS
    state_layers: int = 0
    kv_elements: int = 0  # of one token, tiny


def tiny_config(model_type: str) -> Any:
    """A tiny configuration of the type. Raises any error that the configuration's class raises."""
    kind = type(AutoConfig.for_model(model_type))
    return kind(**_small(kind, model_type))


def _small(kind: Any, model_type: str) -> dict[str, Any]:
    default = kind()
    names = default.to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    given = {name: value for name, value in SMALL.items() if name in names}
    if any(getattr(default, name, None) for name in MLA):
        given["num_key_value_heads"] = 4
        given.pop("head_dim", None)
    given.update(BESIDES.get(model_type, {}))
    for name in getattr(kind, "sub_configs", None) or {}:
        if hasattr(getattr(default, name, None), "to_dict"):
            given[name] = _small(type(getattr(default, name)), model_type)
    return given


def run(model_type: str, *, cut: bool = True) -> Outcome:
    """Serves a class and returns the outcome. `cut`: also with prompts in uneven chunks and mixed batches."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.manual_seed(tiny.hash_of(model_type))
            config = tiny_config(model_type)
            with torch.device("meta"):
                weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if weights > MOST_WEIGHTS:
                return Outcome(model_type, "not built", f"{weights:,} weights: its configuration was not made small")
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            for name, parameter in model.named_parameters():
                if parameter.std() == 0 or parameter.isnan().any() or "sinks" in name:
                    torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.2)
            model.save_pretrained(folder)
            rng = random.Random(model_type)
            prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
            expected = [answer.tokens for answer in tiny.reference(Path(folder), prompts, NUM_TOKENS)]
        # transformers raises all kinds of errors for sizes that do not fit together.
        except Exception as error:
            return Outcome(model_type, "not built", f"{type(error).__name__}: {_line(error)}")
        try:
            return _serve(model_type, Path(folder), prompts, expected, cut)
        except ConfigurationError as error:
            return Outcome(model_type, "refused", _reason(str(error)))
        except Exception as error:
            return Outcome(model_type, "crashed", f"{type(error).__name__}: {_line(error)}")
        finally:
            gc.collect()


def _serve(model_type: str, folder: Path, prompts: list[list[int]], expected: list[list[int]], cut: bool) -> Outcome:
    runner = _load(folder)
    driver = Driver(runner, 3)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt)
    found = list(driver.generate(NUM_TOKENS, max_chunk=7 if cut else 1 << 30).values())
    if found != expected:
        return Outcome(model_type, "wrong", f"{found} for {expected}")
    info = runner.info
    if cut:
        driver.finish_all()
        moves = tiny.hash_of(model_type) % MOVED == 0
        for req_id, tokens in _disturbed(runner, prompts[-1], expected[-1], _load(folder) if moves else None).items():
            if tokens != expected[-1]:
                return Outcome(model_type, "wrong", f"{req_id}: {tokens} for {expected[-1]}")
        for req_id, tokens in _at_once(runner, prompts[-1]).items():
            if tokens != expected[-1]:
                return Outcome(model_type, "wrong", f"{req_id} of the same prompt at once: {tokens} for {expected[-1]}")
    attending = {layer for group in info.groups if group.kind is not AttentionKind.STATE for layer in group.layers}
    states = info.groups[-1].layers if info.state_blocks else ()
    native = isinstance(runner.forward, NativeLlamaForward)
    return Outcome(
        model_type,
        "served",
        way="native" if native else "general, by its own code" if attends_by_itself(runner.forward) else "general",
        attending=len(attending),
        state_layers=len(states),
        kv_elements=math.prod(runner.kv_cache.shape[i] for i in (2, 3, 5)) * len(attending),
    )


def _load(folder: Path) -> TorchRunner:
    return load(folder, max_num_seqs=6, max_model_len=64, num_speculative_tokens=2)


def _disturbed(
    runner: TorchRunner, prompt: list[int], expected: list[int], other: TorchRunner | None
) -> dict[str, list[int]]:
    """The same prompt several times: one that loses its blocks on the way, one that begins with blocks of the first, one token at a
    time, one whose tokens are guessed, rightly and wrongly, and, where there is another runner, one that goes on there."""
    driver = Driver(runner, 5)
    driver.add("preempted", prompt)
    driver.step({"preempted": 8})
    driver.add("prefix hit", prompt, prefix_of="preempted", shared_tokens=8)
    driver.step({"preempted": 2, "prefix hit": 3})
    driver.preempt("preempted")
    answers = {}
    if other is not None:
        driver.add("handed over", prompt)
        driver.step({"handed over": 11})
        moved = Driver(other, 6)
        moved.adopt("handed over", driver)
        driver.finish("handed over")
        answers = moved.generate(NUM_TOKENS, max_chunk=4)
    driver.add("guessed", prompt)
    driver.step({"guessed": len(prompt)})
    guessed = driver.requests["guessed"]
    while len(guessed.output) < NUM_TOKENS:
        right = expected[len(guessed.output) :]
        driver.drafts = {"guessed": [*right[:1], *((token + 1) % tiny.VOCAB for token in right[1:2])]}
        driver.step({"guessed": guessed.pending})
    driver.drafts = {}
    return answers | driver.generate(NUM_TOKENS, max_chunk=1)


def _at_once(runner: TorchRunner, prompt: list[int]) -> dict[str, list[int]]:
    """The same prompt twice in one step: the second request reads blocks that the first one fills in it."""
    info = runner.info
    cache, config = CacheConfig(block_size=4), SchedulerConfig(max_num_seqs=6, max_model_len=info.max_model_len)
    scheduler = Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len)
    engine = Engine(scheduler, runner, None)
    answers: dict[str, list[int]] = {"first": [], "second": []}
    for name in answers:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request(made_request(name, prompt, sampling, block_hasher=scheduler.block_hasher))
    while scheduler.has_unfinished_requests():
        for update in engine.step().updates:
            answers[update.request_id] += update.token_ids
    return answers


def attends_by_itself(forward: object) -> bool:
    return isinstance(forward, TransformersForward) and bool(forward.parts.own)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else "")[:160]


def _reason(text: str) -> str:
    """The reason without this model's name."""
    _, found, rest = text.partition(" cannot be served: ")
    return rest if found else text


def families(text: str, rows: dict[str, str]) -> str:
    """The page with its table by family filled in from the rows by type. A family's name, its types and what is said of images stand in
    the page; whether it is served, and how, is found."""
    lines = text.splitlines(keepends=True)
    begin = lines.index("| family | its types | served | computed by | images |\n") + 2
    for at in range(begin, lines.index("\n", begin)):
        _, name, types, _, _, images, _ = lines[at].split("|")
        all_of_it = [rows[kind] for kind in types.split("`")[1::2]]
        served = [row for row in all_of_it if row.endswith("|") and row.count("|") > 3]
        mark = "–" if not served else "✓" if served == all_of_it else "~"
        ways = dict.fromkeys(row.split("|")[2].strip() for row in served)
        lines[at] = f"|{name}|{types}| {mark} | {'; '.join(ways)} |{images}|\n"
    return "".join(lines)


def page(outcomes: list[Outcome]) -> str:
    """The page as it is, with what was found."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    summary = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("served", "refused", "not built") if verdict in counts
    )
    text = families(
        PAGE.read_text(encoding="utf-8").partition("## Served\n")[0],
        {outcome.model_type: row(outcome) for outcome in outcomes},
    )
    text = re.sub(r"of transformers [\d.]+,", f"of transformers {transformers.__version__},", text)
    text = re.sub(r"\d+ classes: .*", f"{len(outcomes)} classes: {summary}.", text)
    text += "## Served\n\n| type | computed by | handed over | a token keeps | and states |\n|---|---|---|---|---|\n"
    text += "".join(row(outcome) + "\n" for outcome in outcomes if outcome.verdict == "served")
    text += "\n## Refused\n\n| type | why |\n|---|---|\n"
    text += "".join(row(outcome) + "\n" for outcome in outcomes if outcome.verdict == "refused")
    text += (
        "\n## Not tried\n\nThe script does not know how to make these small. Each is probed at load like any other, "
        "and served or refused.\n\n"
    )
    text += "".join(row(outcome) + "\n" for outcome in outcomes if outcome.verdict == "not built")
    return text


def row(outcome: Outcome) -> str:
    if outcome.verdict == "refused":
        return f"| `{outcome.model_type}` | {outcome.why.replace('|', '/')} |"
    if outcome.verdict == "not built":
        return f"- `{outcome.model_type}`"
    states = f"{outcome.state_layers} of {LAYERS} layers" if outcome.state_layers else ""
    return f"| `{outcome.model_type}` | {outcome.way} | yes | {bytes_of_a_token(outcome)} | {states} |"


def bytes_of_a_token(outcome: Outcome) -> str:
    """The formula that matches the measurement of the tiny model; empty if none does."""
    if not outcome.attending:
        return "nothing"
    default = AutoConfig.for_model(outcome.model_type).get_text_config()
    small = tiny_config(outcome.model_type).get_text_config()
    layers = _attending_layers(default)
    for formula in FORMULAS:
        found = [formula(config) for config in (small, default)]
        if found[0] == outcome.kv_elements // outcome.attending and found[1] and layers:
            return f"{2 * found[1] * layers:,} bytes"
    return ""


def _latent(config: Any) -> int | None:
    sizes = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]


def _latent_and_index(config: Any) -> int | None:
    index, latent = getattr(config, "index_head_dim", None), _latent(config)
    return latent + index if latent is not None and isinstance(index, int) else None


def _sums_and_window(config: Any) -> int | None:
    if getattr(config, "compress_rates", None) is None:
        return None
    outer, inner = 2 * config.head_dim, 2 * config.index_head_dim
    places = places_for([config.head_dim, outer, outer, inner, inner])
    return 2 * max(place.begin + place.dim for place in places)


def _keys_and_values(heads: str, size: str, config: Any) -> int | None:
    product = _product(config, heads, size)
    return 2 * product if product else None


HEADS = (
    "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads", "num_heads",
    "decoder_attention_heads"
)  # fmt: skip
SIZES = ("head_dim", "qk_head_dim", "nope+rope", "hidden/heads", "one")
# Formulas for what a layer keeps of a token.
FORMULAS: tuple[Callable[[Any], int | None], ...] = (
    _latent,
    _latent_and_index,
    _sums_and_window,
    *(functools.partial(_keys_and_values, heads, size) for heads in HEADS for size in SIZES),
)


def _product(config: Any, heads: str, size: str) -> int | None:
    def whole(name: str) -> int | None:
        try:
            value = getattr(config, name, None)
        except AmbiguousGlobalPerLayerAttributeError:  # each layer has its own
            return None
        return value if isinstance(value, int) and value > 0 else None

    count = whole(heads)
    queries = whole("num_attention_heads") or whole("n_head")
    width = whole("hidden_size") or whole("n_embd") or whole("d_model")
    if size == "nope+rope":
        parts = whole("qk_nope_head_dim"), whole("qk_rope_head_dim")
        found = max(sum(parts), whole("v_head_dim") or 0) if parts[0] and parts[1] else None  # type: ignore[arg-type]
    elif size == "hidden/heads":
        found = width // queries if width and queries else None
    elif size == "one":
        found = None
    else:
        found = whole(size)
    return count * found if count and found else None


def _attending_layers(config: Any) -> int | None:
    from transformers.cache_utils import get_layer_types_and_kwargs

    try:
        kinds, _ = get_layer_types_and_kwargs(config)
    except Exception:
        return None
    return sum(kind not in ("linear_attention", "conv", "dummy", "mlp", "moe") for kind in kinds)


def written_rows() -> dict[str, str]:
    """The rows of docs/models.md, by type."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith(("| `", "- `")):
            rows[line.split("`")[1]] = line
    return rows


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    outcomes = []
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as processes:
        for outcome in processes.map(run, arguments or TYPES):
            outcomes.append(outcome)
            print(f"{outcome.model_type:28} {outcome.verdict:9} {outcome.way:7} {outcome.why}", flush=True)
    bad = [outcome.model_type for outcome in outcomes if outcome.verdict in ("wrong", "crashed")]
    if bad:
        print(f"wrong answers, or crashes: {', '.join(bad)}")
        return 1
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        return 0
    rows = written_rows()
    changed = [outcome.model_type for outcome in outcomes if rows.get(outcome.model_type) != row(outcome)]
    if changed:
        print(f"docs/models.md says otherwise, `make models-page` writes it: {', '.join(changed)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
