"""Whole tiny models against transformers, on every instruction set that this processor has."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.base.errors import InternalError
from tandem.engine.model.native.forward import NativeLlamaForward, cores_for, supports
from tandem.kernels import library
from tests.engine.model.hooks import Recorder
from tests.engine.native.batches import Sequences
from tests.idling import idle_share

VOCAB = 131
WINDOW = 9
Unit = tuple[torch.dtype, str]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": None,
}  # fmt: skip


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **options}}


CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: transformers.LlamaConfig(**_COMMON, **rope("linear")),
    "llama-yarn": lambda: transformers.LlamaConfig(**_COMMON, **rope("yarn")),
    "llama-llama3": lambda: transformers.LlamaConfig(**_COMMON, **rope("llama3", low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=64)),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen2-some-layers-sliding": lambda: transformers.Qwen2Config(**_COMMON, use_sliding_window=True,
        sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, head_dim=16, sliding_window=WINDOW),
    "mistral-unlimited": lambda: transformers.MistralConfig(**_COMMON, sliding_window=None),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.std() == 0:  # norms and biases begin as constants, which would hide that they are left out
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().flatten()[0]), std=0.2)
    return model


def windows(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def native(model: PreTrainedModel, instruction_set: str = "", threads: int = 1) -> tuple[NativeLlamaForward, Sequences]:
    forward = NativeLlamaForward.from_module(model, threads=threads, instruction_set=instruction_set)
    return forward, Sequences(forward, model, windows(model.config), count=3)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def reference(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_chunks_and_neighbours(unit: Unit, name: str) -> None:
    dtype, instruction_set = unit
    model = build(name)
    ids, others = tokens(60), tokens(60, seed=1)
    expected = torch.stack((reference(model, ids), reference(model, others)))
    model = model.to(dtype)
    forward, sequences = native(model, instruction_set)
    pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    done = 0
    for size in (5, 1, 1, 20, 2, 31):
        chunk = {0: ids[done : done + size], 2: others[done : done + size]}
        logits = forward(sequences.batch(chunk))
        pieces[0].append(logits[:size].clone())
        pieces[1].append(logits[size:].clone())
        done += size
    actual = torch.stack((torch.cat(pieces[0]), torch.cat(pieces[1])))
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
    else:  # as good as torch's own bfloat16
        theirs = torch.stack((reference(model, ids), reference(model, others)))
        assert (actual - expected).std() < 1.2 * (theirs - expected).std()


@pytest.mark.parametrize("count", [1, 100])
def test_hooks_surround_every_layer_in_order(count: int) -> None:
    model = build("llama")
    forward, sequences = native(model)
    expected = forward(sequences.batch({0: tokens(count)})).clone()
    hooks = Recorder()
    assert torch.equal(forward(sequences.batch({1: tokens(count)}), hooks), expected)
    layers = model.config.num_hidden_layers
    for kind in ("load", "save"):
        assert [layer for what, layer in hooks.calls if what == kind] == list(range(layers))
    for layer in range(layers):
        assert hooks.calls.index(("load", layer)) < hooks.calls.index(("save", layer))
    # A long prompt's layers are announced one by one, so that their transfer can begin.
    saved_before_last_load = hooks.calls.index(("load", layers - 1)) - (layers - 1)
    assert saved_before_last_load == (layers - 1 if count == 100 else 0)


class FailingHooks(Recorder):
    def save_kv_layer(self, layer: int) -> None:
        raise RuntimeError("the connector failed")


def test_a_step_that_a_hook_ends_is_not_continued_by_the_next() -> None:
    model = build("llama")
    forward, sequences = native(model)
    expected = forward(sequences.batch({0: tokens(100)})).clone()
    with pytest.raises(RuntimeError, match="the connector failed"):
        forward(sequences.batch({1: tokens(100)}), FailingHooks())
    sequences.computed[1] = 0
    assert torch.equal(forward(sequences.batch({1: tokens(100)})), expected)


def test_a_chunk_without_logits_still_writes_its_keys_and_values() -> None:
    model = build("llama")
    ids = tokens(50)
    forward, sequences = native(model)
    assert forward(sequences.batch({0: ids[:30]}, [])).shape == (0, VOCAB)
    logits = forward(sequences.batch({0: ids[30:]}, [19]))
    torch.testing.assert_close(logits, reference(model, ids)[-1:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rows", [[0], [33], [0, 1, 2], [7, 8, 9, 50, 70], [16, 17, 41, 42, 71]])
def test_some_rows_get_the_logits_that_they_get_among_all(unit: Unit, rows: list[int]) -> None:
    """There are three requests: a prompt, a single token, and a prompt that has begun."""
    model = build("qwen2-some-layers-sliding").to(unit[0])

    def step(wanted: list[int] | None) -> torch.Tensor:
        forward, sequences = native(model, unit[1])
        forward(sequences.batch({1: tokens(20), 2: tokens(30)}, []))
        return forward(sequences.batch({1: tokens(1), 0: tokens(40, seed=1), 2: tokens(31, seed=2)}, wanted))

    assert torch.equal(step(rows), step(None)[rows])


def test_a_checkpoint_in_shards_gives_what_its_model_gives(tmp_path: Path) -> None:
    model = build("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    forward, sequences = native(model)
    expected = forward(sequences.batch({0: tokens(40)})).clone()
    shares: list[float] = []
    config = AutoConfig.from_pretrained(tmp_path)
    read = NativeLlamaForward.from_checkpoint(tmp_path, config, dtype=torch.float32, threads=1, progress=shares.append)
    assert torch.equal(read(Sequences(read, model, windows(config)).batch({0: tokens(40)})), expected)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_release_gives_each_matrix_up() -> None:
    model = build("llama")
    expected = reference(model, tokens(30))
    config_windows = windows(model.config)
    forward = NativeLlamaForward.from_module(model, threads=1, release=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    actual = forward(Sequences(forward, model, config_windows).batch({0: tokens(30)}))
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ("token_ids", "vocabulary"),
        ("positions", "position"),
        ("slot_mapping", "slot"),
        ("block_tables", "block is not in the cache"),
        ("context_lens", "lengths do not agree"),
        ("logit_rows", "logit row"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(spoiled: str, reason: str) -> None:
    forward, sequences = native(build("llama"))
    good = forward(sequences.batch({0: tokens(8)})).clone()
    sequences.computed[0] = 0
    batch = sequences.batch({0: tokens(8)})
    value = getattr(batch, spoiled)
    tensor = value[0] if isinstance(value, tuple) else value
    tensor.view(-1)[0] = -5
    with pytest.raises(InternalError, match=reason):
        forward(batch)
    sequences.computed[0] = 0
    batch = sequences.batch({0: tokens(8)}, [3, 2])
    with pytest.raises(InternalError, match="logit rows must ascend"):
        forward(batch)
    sequences.computed[0] = 0
    assert torch.equal(forward(sequences.batch({0: tokens(8)})), good)


def test_a_cache_of_another_shape_is_refused() -> None:
    model = build("llama")
    forward, sequences = native(model)
    with pytest.raises(InternalError, match="does not fit"):
        forward.use_cache(sequences.cache.bfloat16(), sequences.groups)
    with pytest.raises(InternalError, match="does not fit"):
        forward.use_cache(sequences.cache[..., :4].contiguous(), sequences.groups)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gemma2"}, "gemma2"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differs between layers"),
        ({"head_dim": 512}, "head size"),
        ({"sliding_window": 5}, "sliding window"),
    ],
)
def test_what_the_library_does_not_compute_is_left_to_others(change: dict[str, Any], reason: str) -> None:
    config = transformers.LlamaConfig(**_COMMON)
    assert supports(config, torch.float32) is None
    for name, value in change.items():
        object.__setattr__(config, name, value)
    assert reason in (supports(config, torch.float32) or "")


def test_other_devices_and_dtypes_are_left_to_others() -> None:
    config = transformers.LlamaConfig(**_COMMON)
    assert "cuda" in (supports(config, torch.bfloat16, "cuda") or "")
    assert "float16" in (supports(config, torch.float16) or "")


class Churning:
    """The library, with other threads' worth of small allocations between any two of its calls."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._kept: list[object] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def churn_and_call(*arguments: Any) -> Any:
            gc.collect()
            # Arrays of one pointer, as a step's are, that lead nowhere.
            self._kept = [(ctypes.c_void_p * 1)(0x10) for _ in range(5_000)]
            return function(*arguments)

        return churn_and_call


def test_a_step_does_not_read_memory_that_python_has_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids = tokens(40)
    expected = reference(model, ids)
    churning = Churning(library.load())
    monkeypatch.setattr(library, "load", lambda: churning)
    forward, sequences = native(model)
    logits = forward(sequences.batch({0: ids}))
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
@pytest.mark.slow
def test_idle_threads_sleep() -> None:
    """An engine that waits for requests must not use its cores."""
    model = build("llama")
    forward, sequences = native(model, threads=2)
    forward(sequences.batch({0: tokens(20)}))
    threading.Event().wait(0.05)  # a thread may look for work a moment longer
    assert idle_share(seconds=0.5) < 0.02
    forward.close()


@linux
def test_models_come_and_go_without_leaving_anything() -> None:
    model = build("llama")

    def once() -> None:
        forward, sequences = native(model, threads=2)
        forward(sequences.batch({0: tokens(20)}))

    for _ in range(3):
        once()
    gc.collect()
    threads, memory = num_threads(), resident_bytes()
    for _ in range(30):
        once()
    gc.collect()
    assert num_threads() == threads
    # A model maps some megabytes, so thirty that stayed would show.
    assert resident_bytes() - memory < 8 << 20


def test_close_ends_the_threads_at_once() -> None:
    forward, sequences = native(build("llama"), threads=2)
    before = num_threads()
    forward.close()
    forward.close()
    assert num_threads() == before - min(1, len(os.sched_getaffinity(0)) - 1)
    with pytest.raises(InternalError, match="closed"):
        forward(sequences.batch({0: tokens(3)}))


@linux
def test_threads_are_bound_only_to_cores_that_are_all_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 9})
    assert cores_for(0) == [2, 5, 9]
    assert cores_for(3) == [2, 5, 9]
    assert cores_for(8) == [2, 5, 9], "never more threads than cores"
    assert cores_for(2) == [-1, -1], "which two is not for us to say"


def test_a_step_leaves_the_callers_affinity_alone() -> None:
    forward, sequences = native(build("llama"), threads=2)
    before = os.sched_getaffinity(0)
    forward(sequences.batch({0: tokens(20)}))
    assert os.sched_getaffinity(0) == before
    forward.close()


@linux
def test_memory_is_steady_over_many_steps() -> None:
    model = build("mistral")
    forward, sequences = native(model, threads=1)
    lengths = (40, 1, 3, 60, 1)

    def round_of_steps() -> None:
        for length in lengths:
            sequences.computed = [0, 0, 0]
            forward(sequences.batch({0: tokens(length), 1: tokens(5)}))

    for _ in range(10):
        round_of_steps()
    memory = resident_bytes()
    for _ in range(200):
        round_of_steps()
    assert resident_bytes() - memory < 2 << 20


def test_other_threads_run_while_a_step_does() -> None:
    """The GIL is released: another Python thread makes progress during one long step."""
    model = build("llama")
    forward, _ = native(model)
    sequences = Sequences(forward, model, windows(model.config), length=2048)
    batch = sequences.batch({0: tokens(2000)}, [1999])
    running, counted = threading.Event(), [0]
    stop = threading.Event()

    def count() -> None:
        running.set()
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    assert running.wait(10)
    before = counted[0]
    forward(batch)
    during = counted[0] - before
    stop.set()
    counter.join(10)
    assert during > 10
    assert torch.isfinite(sequences.cache[1]).any()
