"""Which files are loaded, which models are refused, and with which messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import chunked_causal_mask_function

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model import memory, paths
from tandem.engine.model.attention.interface import probed_mask
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.checkpoint import eos_tokens
from tandem.engine.model.leftovers import refuse_leftovers
from tandem.engine.model.loading import load_runner
from tandem.engine.model.memory import size_block_pool
from tandem.engine.model.source import ModelSource, tokenizer_json
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.transformers_forward import TransformersForward
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tests.engine.model import tiny
from tests.engine.model.driver import answer_of, load

PROMPT = [7, 9, 11, 13, 5]
BOTH_PATHS = pytest.mark.parametrize("native", [True, False])


def greedy(runner: TorchRunner, num_tokens: int = 6) -> list[int]:
    return answer_of(runner, PROMPT, num_tokens)


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(path, **options)
    return str(caught.value)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


def edit(path: Path, file: str, **changes: Any) -> None:
    content = json.loads((path / file).read_text())
    content.update(changes)
    (path / file).write_text(json.dumps(content))


def test_a_model_is_described_as_the_engine_needs_it(tmp_path: Path) -> None:
    path = tiny.save("gemma3", tmp_path)
    edit(path, "generation_config.json", eos_token_id=[2, 17])
    runner = load(path, dtype="bfloat16")
    info = runner.info
    assert (info.name, info.dtype, info.device) == ("gemma3", "bfloat16", "cpu")
    assert (info.vocab_size, info.max_model_len) == (tiny.VOCAB, 256)
    assert info.eos_token_ids == {2, 17}
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (4, 2, 8)
    assert [group.kind for group in info.groups] == [AttentionKind.FULL, *[AttentionKind.SLIDING] * 3]
    assert [group.window for group in info.groups] == [None, *[tiny.WINDOW] * 3]
    assert runner.kv_cache.shape == (info.num_blocks, 1, 2, 2, 4, 8)
    assert runner.kv_cache.dtype == torch.bfloat16
    assert runner.kv_cache.is_contiguous()
    assert not runner.kv_cache.any()


def test_the_context_may_be_shorter_than_what_was_trained_and_never_longer(llama: Path) -> None:
    assert load(llama, max_model_len=100).info.max_model_len == 100
    assert load(llama).info.max_model_len == 256
    with pytest.raises(ConfigurationError, match="max_model_len is 1000, and the model's context is 256 tokens"):
        load(llama, max_model_len=1000)


def test_yarn_stretches_a_model_that_says_the_length_it_had_before(llama: Path) -> None:
    """As Qwen's own instructions have it: the rotary parameters are added, and nothing else is changed."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    edit(llama, "config.json", rope_parameters=rope)
    assert load(llama).info.max_model_len == 1024
    prompt = [3 + 7 * index % 120 for index in range(300)]
    (expected,) = tiny.reference(llama, [prompt], 4)
    assert answer_of(load(llama), prompt, 4) == expected.tokens


def test_rotary_embedding_that_depends_on_the_batch_is_kept_to_its_constant_range(llama: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    edit(llama, "config.json", rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4})
    assert load(llama).info.max_model_len == 64


@pytest.mark.parametrize(("dtype", "native"), [("auto", True), ("auto", False), ("bfloat16", True), ("float16", True)])
def test_half_precision_runs(llama: Path, dtype: str, native: bool) -> None:
    weights = load_file(llama / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, llama / "model.safetensors", {"format": "pt"}
    )
    edit(llama, "config.json", dtype="bfloat16")
    runner = load(llama, dtype=dtype, native=native)
    assert runner.info.dtype == ("bfloat16" if dtype == "auto" else dtype)
    assert len(greedy(runner)) == 6


@BOTH_PATHS
def test_progress_is_told_and_ends(llama: Path, native: bool) -> None:
    told: list[tuple[str, float]] = []
    load_runner(
        ModelConfig(path=str(llama), device="cpu", threads=1),
        CacheConfig(memory_bytes=8 << 20),
        SchedulerConfig(),
        lambda what, share: told.append((what, share)),
        native=native,
    )
    weights = [share for what, share in told if what == "loading weights"]
    assert weights == sorted(weights)
    assert weights[-1] == 1.0
    assert told[-1] == ("ready", 1.0)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "no model is named" in refusal("")
    (tmp_path / "empty").mkdir()
    assert "neither a config.json nor a .gguf" in refusal(tmp_path / "empty")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "empty" / name).touch()
    assert "a.gguf, b.gguf" in refusal(tmp_path / "empty")
    (tmp_path / "model.bin").touch()
    assert "neither a model's folder nor a .gguf" in refusal(tmp_path / "model.bin")


@BOTH_PATHS
def test_a_checkpoint_without_weights_is_an_error_and_not_a_random_model(llama: Path, native: bool) -> None:
    (llama / "model.safetensors").unlink()
    message = refusal(llama, native=native)
    assert "cannot be" in message
    assert "safetensors" in message


@BOTH_PATHS
def test_a_tensor_in_two_files_is_refused(llama: Path, native: bool) -> None:
    """The last file would win in silence, whatever the index says."""
    weights, name = load_file(llama / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    (llama / "model.safetensors").rename(llama / "model-1.safetensors")
    save_file(
        {name: weights[name] + 1, "model.norm.weight": weights["model.norm.weight"]}, llama / "model-2.safetensors"
    )
    files = dict.fromkeys(weights, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert re.search(rf"{name} is in model-1\S+ and in model-2\S+ which of them", refusal(llama, native=native))
    del weights[name]
    save_file(weights, llama / "model-1.safetensors", {"format": "pt"})
    assert re.search(r"model\.norm\.weight is in model-1\S+ and in model-2", refusal(llama, native=native))
    (llama / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refusal(llama, native=native)


def test_a_whole_file_beside_an_index_of_others_is_refused_where_transformers_would_take_it(llama: Path) -> None:
    """The content that nodes compare, and the native path, go by the index."""
    shutil.copy(llama / "model.safetensors", llama / "model-1.safetensors")
    files = dict.fromkeys(load_file(llama / "model.safetensors"), "model-1.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert "has model.safetensors, and model.safetensors.index.json that names other" in refusal(llama, native=False)
    (llama / "model.safetensors").unlink()
    assert greedy(load(llama, native=False)) == greedy(load(llama, native=True))


def test_a_tokenizer_s_own_code_never_runs_for_a_grammar(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")  # transformers asks on the terminal unless it is told
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    (llama / "own.py").write_text(f"open({str(llama / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigurationError, match="no tokenizer that grammars can follow"):
        tokenizer_json(ModelSource(llama, None, "llama"))
    assert not (llama / "ran").exists()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_an_adapter_beside_a_model_is_refused_where_transformers_would_add_it(
    tmp_path: Path, architecture: str
) -> None:
    """It does so only where PEFT is installed, so two nodes with models of one digest would compute different ones."""
    folder = tiny.save(architecture, tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    assert "an adapter beside the model (adapter_config.json)" in refusal(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/dev/zero", "parts/../../model.safetensors"])
def test_an_index_that_names_files_elsewhere_is_refused(llama: Path, name: str) -> None:
    """The folder was fetched from somewhere, and must not say which of this machine's other files are read."""
    files = dict.fromkeys(load_file(llama / "model.safetensors"), name)
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for native in (True, False):
        assert f"names {name}, which is not in its folder" in refusal(llama, native=native)


def test_memory_that_the_cache_left_too_little_of_is_said_in_a_sentence(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has more to say.")

    monkeypatch.setattr(paths, "_choose_attention", attention)
    message = refusal(llama, native=False)
    assert "beside the KV cache: CUDA out of memory; give the cache less with --kv-memory" in message


def test_a_configuration_that_cannot_be_read_is_an_error_in_one_sentence(llama: Path) -> None:
    edit(llama, "config.json", hidden_act="sine")
    assert refusal(llama) == "llama cannot be loaded: 'sine' is missing, or not known"
    (llama / "config.json").write_text("{")
    message = refusal(llama)
    assert "config.json cannot be read" in message
    assert "\n" not in message


def test_a_dtype_and_a_device_that_there_is_not_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model.dtype must be auto or one of float32" in refusal(llama, dtype="int3")
    assert "model.device must be" in refusal(llama, device="abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device here" in refusal(llama, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "the last CUDA device here is cuda:1" in refusal(llama, device="cuda:2")


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(num_hidden_layers=2, layer_types=["minimax_m3_sparse", "full_attention"])
    config.save_pretrained(tmp_path)
    assert "layers of the kind minimax_m3_sparse, of whose tokens" in refusal(tmp_path)


TINY_BERT = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BloomConfig", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
        ("BertConfig", {"hidden_size": 16, **TINY_BERT}),
        ("MptConfig", {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}),
    ],
)
def test_attention_that_is_not_ours_to_page_is_noticed(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """An attention outside of the interface that looks ahead: only running the model shows it."""
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(vocab_size=50, **options))
    model.save_pretrained(tmp_path / kind)
    message = refusal(tmp_path / kind)
    assert f"a model of type {kind.removesuffix('Config').lower()} " in message
    assert "cannot be served" in message


def test_a_model_that_counts_positions_by_itself_is_refused(tmp_path: Path) -> None:
    """It accepts positions and ignores them."""
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16,
        max_position_embeddings=64, is_encoder_decoder=False, is_decoder=True
    )  # fmt: skip
    transformers.BartForCausalLM(config).save_pretrained(tmp_path / "bart")
    assert "bart cannot be served: it counts positions by itself" in refusal(tmp_path / "bart")


@pytest.mark.parametrize("ids", ["</s>", [2, None], [2, "</s>"], 2.5, -1])
def test_an_end_that_is_no_token_is_refused_and_one_below_zero_is_none(llama: Path, ids: Any) -> None:
    """It would fail the first step with `min_tokens`, and the first grammar."""
    edit(llama, "generation_config.json", eos_token_id=ids)
    if ids == -1:
        assert load(llama).info.eos_token_ids == {2}
    else:
        assert "eos_token_id" in refusal(llama)


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": None}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_form_is_named(llama: Path, index: Any) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert str(llama) in refusal(llama)


def test_a_configuration_that_names_no_end_is_no_reason_to_fail() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=[3, 4]))
    assert eos_tokens(ModelSource(Path("nowhere"), None, "x"), config) == {3, 4}


@pytest.mark.parametrize("window", [tiny.WINDOW, None])
def test_a_window_that_only_the_mask_tells_is_seen(tmp_path: Path, window: int | None) -> None:
    """Phimoe's layers do not pass their window to their attention, and the window is wider than the prompts that are tried."""
    config = transformers.PhimoeConfig(**tiny.COMMON, num_local_experts=2, sliding_window=window)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phimoe")
    (expected,) = tiny.reference(tmp_path / "phimoe", [PROMPT], 8)
    runner = load(tmp_path / "phimoe")
    assert [group.window for group in runner.info.groups] == [window]
    assert greedy(runner, 8) == expected.tokens


def test_a_mask_that_is_no_window_is_noticed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, say: as long as what is tried out, they look like no window at all."""
    from transformers.models.llama import modeling_llama

    def chunked(**kwargs: Any) -> Any:
        left = torch.zeros(1, dtype=torch.int64)
        return probed_mask(batch_size=1, q_length=8, kv_length=8, mask_function=chunked_causal_mask_function(64, left))

    monkeypatch.setattr(modeling_llama, "create_causal_mask", chunked)
    assert "how far layer 0 sees depends on where it is" in refusal(llama, native=False)


def test_a_position_bias_that_the_kernel_does_not_know_is_left_to_the_model_s_own_code(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything that the model's own attention does besides: the two are compared. What is not so in parts is refused."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        keys, rows = torch.arange(key.shape[2]), torch.arange(query.shape[2])
        ahead = key.shape[2] - query.shape[2] if right else 0
        distance = keys[None, :] - rows[:, None] - ahead
        return own(module, query, key, value, mask + 0.5 * distance.clamp(max=0), scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    right = True
    forward = load(llama, native=False).forward
    assert isinstance(forward, TransformersForward)
    assert len(forward.parts.own) == len(forward.parts.layers)
    right = False
    assert "read in parts gives other logits" in refusal(llama, native=False)


def test_too_little_memory_says_how_much_is_missing_and_what_helps(llama: Path) -> None:
    edit(llama, "config.json", max_position_embeddings=8192)
    assert re.search(r"missing; raise --kv-memory, or .* --max-model-len", refusal(llama, memory_bytes=1 << 20))
    assert re.search(r"--kv-memory asks for .* is missing", refusal(llama, memory_bytes=1 << 60))


def test_the_pool_is_a_share_of_what_is_free_up_to_what_can_be_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(llama), device="cpu", threads=1, dtype="float32")
    block = 2 * 2 * 2 * 16 * 8 * 4

    def blocks(free: int, seqs: int = 256, share: float = 0.5) -> int:
        monkeypatch.setattr(memory, "available_bytes", lambda device: free)
        return load_runner(config, CacheConfig(memory_share=share), SchedulerConfig(max_num_seqs=seqs)).info.num_blocks

    assert blocks(100 * block) == 50
    assert blocks(100 * block, share=0.8) == 80
    # 256 tokens are 16 blocks, and one block is the null block.
    assert blocks(1 << 40, seqs=3) == 3 * 16 + 1
    monkeypatch.setattr(memory, "CPU_CAP_BYTES", 60 * block)
    assert blocks(1 << 40) == 60
    with pytest.raises(ConfigurationError, match="give the cache more with --kv-memory"):
        blocks(30 * block)


def test_what_a_step_needs_beside_the_cache_stays_free(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100 << 20)
    plan = plan_cache((AttentionLayer(0, 2, 2, 8, 8, None),), 16)
    block = plan.elements_per_block * 4

    def blocks(beside: int, device: str = "cuda", mapped: int = 0, **cache: Any) -> int:
        return size_block_pool(
            plan, CacheConfig(**cache), dtype=torch.float32, device=torch.device(device), max_model_len=64,
            max_num_seqs=1 << 20, tokens_per_step=64, beside=beside, mapped=mapped
        )  # fmt: skip

    assert blocks(0) == int((100 << 20) * 0.85) // block
    assert blocks(0, "cpu") == (50 << 20) // block
    assert blocks(0, "cpu", mapped=40 << 20) == (30 << 20) // block, "a file's pages count as free"
    assert blocks(40 << 20) == (60 << 20) // block
    assert blocks(40 << 20, memory_share=0.1) == int((100 << 20) * 0.1) // block
    with pytest.raises(ConfigurationError, match="is missing"):
        blocks(100 << 20)


def test_loading_needs_no_copy_of_the_folder(llama: Path) -> None:
    """What was read may be moved away while the model runs."""
    runner = load(llama)
    expected = greedy(runner)
    shutil.rmtree(llama)
    assert greedy(runner) == expected


def test_where_there_is_no_compiler_the_model_runs_all_the_same(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy(load(llama))
    monkeypatch.setattr(paths, "supports", lambda *_: "no C++ compiler")
    with caplog.at_level("INFO"):
        assert greedy(load(llama)) == expected
    assert any("no C++ compiler" in record.getMessage() for record in caplog.records)


def test_a_model_that_is_computed_without_the_native_library_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_outcome", [BuildFailed("there is no C++ compiler:\ninstall g++")])
    slower = load(llama).info.slower
    assert slower.startswith("it computes without the native library, several times slower: there is no C++ compiler")
    assert "\n" not in slower
    monkeypatch.setattr(library, "_outcome", [])
    assert load(llama).info.slower == ""


def add(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """None takes a tensor away."""
    weights = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@BOTH_PATHS
@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        pytest.param({}, {UP: None}, [f"lacks {UP}"], id="a matrix is missing"),
        pytest.param(
            {"num_hidden_layers": 1}, {},
            ["holds 2 layers, and its configuration says 1", "model.layers.1.input_layernorm.weight", "and 5 more",
             "num_hidden_layers in config.json"], id="more layers than the configuration says",
        ),
        pytest.param({}, {BIAS: torch.ones(32)}, [f"would answer without {BIAS}", "correct config.json"], id="a bias too many"),
        pytest.param({"attention_bias": True}, {}, ["lacks model.layers.0.self_attn."], id="a bias too few"),
        pytest.param(
            {"intermediate_size": 40}, {}, [r"mlp\.\w+\.weight is \(.*48.*\) in its checkpoint, and \(.*40.*\) by its config"],
            id="another size",
        ),
    ],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_configuration_are_refused_by_name(
    llama: Path, native: bool, config: dict[str, Any], weights: dict[str, torch.Tensor | None], said: list[str]
) -> None:
    edit(llama, "config.json", **config)
    add(llama, weights)
    message = refusal(llama, native=native)
    assert all(re.search(each, message) for each in said), message


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "phi3", "gpt-oss"])
def test_layers_are_known_by_whatever_name_an_architecture_gives_them(tmp_path: Path, architecture: str) -> None:
    path = tiny.save(architecture, tmp_path)
    config = json.loads((path / "config.json").read_text())
    key = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    edit(path, "config.json", **{key: config[key] - 1}, layer_types=(config.get("layer_types") or [])[:1] or None)
    assert f"holds {config[key]} layers, and its configuration says {config[key] - 1}" in refusal(path)


@BOTH_PATHS
def test_what_text_does_not_need_may_be_there(llama: Path, native: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = greedy(load(llama, native=native))
    weights = load_file(llama / "model.safetensors")
    add(
        llama,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
            "model.embeddings.position_ids": torch.arange(8),
            "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
            "vision_tower.encoder.layers.7.mlp.fc1.weight": torch.ones(2, 2),
            "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
        },
    )
    with caplog.at_level("INFO"):
        assert greedy(load(llama, native=native)) == expected
    assert any("text does not need" in message and "position_ids" in message for message in caplog.messages)


def test_a_head_of_its_own_counts_more_than_a_configuration_that_ties_it(llama: Path) -> None:
    torch.manual_seed(5)
    add(llama, {"lm_head.weight": torch.randn(tiny.VOCAB, 32)})
    (expected,) = tiny.reference(llama, [PROMPT], 6)
    assert greedy(load(llama)) == greedy(load(llama, native=False)) == expected.tokens


def test_layers_that_only_guess_further_tokens_are_no_layers_of_the_model(tmp_path: Path) -> None:
    path = tiny.save("deepseek-v3", tmp_path)
    add(path, {"model.layers.2.input_layernorm.weight": torch.ones(32)})
    edit(path, "config.json", num_nextn_predict_layers=1)
    load(path)
    edit(path, "config.json", num_nextn_predict_layers=0)
    assert "holds 3 layers, and its configuration says 2" in refusal(path)


def test_layers_are_named_in_their_order_and_not_all_of_them() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=9))
    left = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (11, 10, 9, 30, 12, 13)]
    with pytest.raises(ConfigurationError) as caught:
        refuse_leftovers("m", left, config)
    assert "holds 31 layers" in str(caught.value)
    assert "without model.layers.9.mlp.up_proj.weight, model.layers.10." in str(caught.value)
    assert "and 2 more" in str(caught.value)
