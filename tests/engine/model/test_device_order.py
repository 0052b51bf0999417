"""The engine on a device that computes late (tests.engine.model.fake_device): planning ahead, recorded steps, aborts,
preemption, and a peer that writes into blocks as soon as it may. Answers are those of each request alone on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model import paths
from tandem.engine.model.adapters import Adapter, LayerUpdate
from tandem.engine.model.attention.layers import plan_cache
from tandem.engine.model.capabilities import ModelLoad
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.cuda.decode_graphs import CudaRecorder, DecodeGraphs
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.loading import load_runner
from tandem.engine.model.paths import load_general
from tandem.engine.model.runner import Forward, ModelInfo
from tandem.engine.model.source import find_source
from tandem.engine.model.speculation.capability import TextDrafter
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.wings import capabilities_for
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.engine.structured.masks import GrammarMasks
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    KVCacheMemory,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
    WorkerConnector,
)
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.engine.model.fake_device import CUDA, DeviceTensor, FakeDevice, memory
from tests.engine.structured.grammar_walks import END, backend
from tests.more import more

BLOCK = 4
MAX_LEN = 64
NUM_BLOCKS = 17  # of which one request at full length needs 16
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=MAX_LEN)
CACHE = CacheConfig(block_size=BLOCK, hash_seed="tests")


class Truth:
    """What a request's answer is, and the KV of its prompt: from an engine on the CPU."""

    def __init__(self, path: Path, kept: Literal["auto", "fp8"] = "auto") -> None:
        model = ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1)
        cache = CacheConfig(block_size=BLOCK, memory_bytes=4 << 20, prefix_caching=False, dtype=kept)
        with pytest.MonkeyPatch.context() as patch:
            if kept == "fp8":  # rounded so far, a last bit that differs becomes another number
                patch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
            self.runner = load_runner(model, cache, SchedulerConfig(max_num_seqs=1, max_model_len=96), native=False)
        self._known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def of(self, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        """Its tokens, and [blocks, ...] of the prompt."""
        key = tuple(prompt)
        if key not in self._known:
            driver = Driver(self.runner)
            driver.add("r", prompt)
            driver.step({"r": len(prompt)})
            kv = self.runner.kv_cache[driver.requests["r"].blocks[0]].clone()
            self._known[key] = driver.generate(16)["r"], kv
            driver.finish_all()
        return self._known[key]

    def allows(self, prompt: list[int], tokens: list[int], within: float) -> bool:
        """Whether each token is the likeliest one or, after all before it, less likely by `within` in the logarithm at most."""
        for index, token in enumerate(tokens):
            if token == self.of(prompt + tokens[:index])[0][0]:
                continue
            driver = Driver(self.runner)
            driver.add("r", prompt + tokens[:index], SamplingParams(temperature=0.0, logprobs=5))
            driver.generate(1)
            best = driver.requests["r"].logprobs[0].top
            driver.finish_all()
            if dict(best).get(token, float("-inf")) < best[0][1] - within:
                return False
        return True


class Metadata(ConnectorMetadata):
    def __init__(self, loads: list[tuple[str, list[int]]]) -> None:
        self.loads = loads


class Peer(SchedulerConnector, WorkerConnector):
    """Writes the whole prompt's KV at the moment from which it may, from outside the device's line of work."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._planned: list[tuple[str, list[int]]] = []
        self._bound: list[tuple[str, list[int]]] = []
        self._arrived: dict[str, Handoff] = {}
        self.remote: dict[str, list[int]] = {}  # request id -> prompt
        self.cache: torch.Tensor | None = None

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self.remote or request.num_tokens > request.num_prompt_tokens:
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._planned.append((request.request_id, list(block_ids[0])))

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        planned, self._planned = self._planned, []
        return Metadata(planned)

    def has_pending_work(self) -> bool:
        return bool(self._planned or self._arrived)

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        return False

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        self.cache = memory.tensor

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        assert isinstance(metadata, Metadata)
        self._bound = metadata.loads

    def start_load_kv(self) -> None:
        assert self.cache is not None
        for request_id, table in self._bound:
            prompt = self.remote[request_id]
            tokens, kv = self._truth.of(prompt)
            memory(self.cache)[table[: len(kv)]] = kv
            self._arrived[request_id] = Handoff(first_token=tokens[0], num_tokens=len(prompt))
        self._bound = []

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        arrived, self._arrived = self._arrived, {}
        return ConnectorOutput(finished_recving=arrived)

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def truth(path: Path) -> Truth:
    return Truth(path)


@contextmanager
def on_the_device(
    path: Path, truth: Truth, device: FakeDevice, *, graphs: bool, drafts: int = 0, adapters: Sequence[Adapter] = ()
) -> Iterator[tuple[Engine, Peer]]:
    with device.present(), torch.inference_mode():
        peer = Peer(truth)
        engine = engine_on(path, device, (peer, peer), graphs=graphs, drafts=drafts, adapters=adapters)
        yield engine, peer
        engine.shutdown()


def engine_on(
    path: Path,
    device: FakeDevice,
    connector: tuple[SchedulerConnector, WorkerConnector],
    *,
    graphs: bool,
    drafts: int = 0,
    kept: torch.dtype = torch.float32,
    adapters: Sequence[Adapter] = (),
) -> Engine:
    """To be called while the device is present."""
    source = find_source(str(path))
    with pytest.MonkeyPatch.context() as patch:
        # Its parts as they are on a GPU.
        patch.setattr(paths, "pieces_for", lambda *_: DevicePieces())
        config, cpu = read_config(source), torch.device("cpu")
        loading = ModelLoad(
            ModelConfig(max_lora_rank=RANK), CACHE, SchedulerConfig(max_loras=len(adapters)), source, config,
            torch.float32, cpu, 1, lambda *_: None
        )  # fmt: skip
        capabilities = capabilities_for(loading)
        loaded = load_general(loading, capabilities)
    plan = plan_cache(loaded.layers, BLOCK, loaded.states, kept)
    cache = torch.zeros(plan.shape(NUM_BLOCKS), device=CUDA, dtype=kept)
    device.synchronize()
    assert isinstance(cache, DeviceTensor)
    shape = ForwardShape(CONFIG.max_num_seqs, MAX_LEN)
    forward: Forward = loaded.use_cache(cache, plan, shape)
    slots = next((each.adapters for each in capabilities if each.adapters is not None), None)
    if graphs:
        recorded = DecodeGraphs(
            forward,  # type: ignore[arg-type]
            CudaRecorder(CUDA),
            num_groups=len(plan.all_groups),
            block_size=BLOCK,
            max_tokens=CONFIG.max_num_seqs,
            device=CUDA,
        )
        recorded.record_ahead(lambda _share: None)
        assert len(recorded.shapes) == 3
        forward = recorded
    info = ModelInfo(
        name="fake", dtype="float32", device="cuda:0", vocab_size=loaded.vocab_size, max_model_len=MAX_LEN,
        eos_token_ids=frozenset(), num_layers=len(loaded.layers), num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim, groups=plan.all_groups, num_blocks=NUM_BLOCKS
    )  # fmt: skip
    masks = GrammarMasks(TokenizerGrammars(backend().to_str, loaded.vocab_size, frozenset({END})))
    runner = TorchRunner(
        info, cache, forward, block_size=BLOCK, max_num_seqs=CONFIG.max_num_seqs, num_speculative_tokens=drafts,
        masks=masks, adapters=slots,
        parts=[masks, *(part for each in capabilities for part in each.start(NUM_BLOCKS, shape))],
        drafter=TextDrafter() if drafts else None
    )  # fmt: skip
    if slots is not None:
        slots.serve(adapters, set(), 0.0)
    planner, mover = connector
    scheduler = Scheduler(CONFIG, CACHE, info.groups, NUM_BLOCKS, MAX_LEN, connector=planner)
    assert CONFIG.plans_ahead(info.device)
    return Engine(scheduler, runner, mover, ahead=True)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def test_blocks_of_an_aborted_prompt_are_free_when_the_device_has_written_them(path: Path, truth: Truth) -> None:
    """The steps of a long prompt sample nothing. Aborted between them, its blocks go to a request whose KV a peer
    writes at once: a step that the device still had to do overwrote that."""
    device = FakeDevice()
    with on_the_device(path, truth, device, graphs=False) as (engine, peer):
        engine.add_request(made_request("long", range(3, 51), greedy(4)))
        for _ in range(3):
            engine.step()
        peer.remote["loaded"] = prompt = list(range(100, 131)) + list(range(5, 30))
        engine.abort_requests(["long"])
        engine.add_request(made_request("loaded", prompt, greedy(8)))
        tokens: list[int] = []
        for _ in range(12):
            for update in engine.step().updates:
                tokens += update.token_ids
        assert tokens == truth.of(prompt)[0][:8]


@pytest.mark.parametrize(
    ("seed", "graphs"), [(0, True), *more([(0, False), (1, False), (1, True), (2, False), (2, True)])]
)
def test_whatever_comes_and_goes_answers_are_right(path: Path, truth: Truth, seed: int, graphs: bool) -> None:
    rng = random.Random(seed)
    device = FakeDevice(seed, pace=rng.choice([0.0, 0.02, 0.3]))
    prompts: dict[str, list[int]] = {}
    told: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    ended: set[str] = set()
    aborted: set[str] = set()
    with on_the_device(path, truth, device, graphs=graphs) as (engine, peer):
        scheduler = engine.scheduler
        for step in range(400):
            if len(prompts) < 10 and rng.random() < 0.3:
                name = f"r{len(prompts)}"
                start = rng.randrange(3)
                prompts[name] = [3 + (start * 37 + i * (start + 1)) % 120 for i in range(rng.randint(1, 30))]
                lengths[name] = rng.randint(1, 8)
                told[name] = []
                if rng.random() < 0.5:
                    peer.remote[name] = prompts[name]
                engine.add_request(made_request(name, prompts[name], greedy(lengths[name])))
            alive = sorted(set(prompts) - ended - aborted)
            if alive and rng.random() < 0.08:
                aborted.add(name := rng.choice(alive))
                engine.abort_requests([name])
            for update in engine.step().updates:
                assert update.error is None
                told[update.request_id] += update.token_ids
                if update.finish is not None:
                    ended.add(update.request_id)
            scheduler.check_integrity()
            if step > 40 and len(prompts) == 10 and not scheduler.has_work():
                break
        for name, tokens in told.items():
            right = truth.of(prompts[name])[0]
            if name not in aborted:
                assert len(tokens) == lengths[name]
            assert tokens == right[: len(tokens)]
        assert scheduler.stats().free_blocks == scheduler.stats().total_blocks


# The one wait of a step: for the tokens of the step before it, or for its end if it samples none.
ORDINARY = "an event: staging.py wait"
# Of rotary embeddings, which this device keeps on the host as it does all that belongs to the model.
OF_THE_MODEL = "ordinary memory: modeling_"


@pytest.mark.parametrize(
    ("name", "graphs", "drafts"),
    [
        ("llama", True, 0),
        ("llama", False, 2),
        ("deepseek-v3", False, 0),
        ("lfm2", False, 0),
        *more((name, False, 0) for name in ("llama", "gemma3", "mixtral", "qwen3-moe", "mamba", "qwen3.5")),
    ],
)
def test_no_step_makes_the_host_wait_for_the_device(
    name: str, graphs: bool, drafts: int, truth: Truth, tmp_path: Path
) -> None:
    """Prompts, decodes and both in one step, greedy and sampled with every restriction: no value is read on the host, no shape depends on
    one, and nothing is copied from ordinary memory."""
    device = FakeDevice()
    asked = [
        greedy(3),
        SamplingParams(seed=1, top_p=0.9, max_tokens=3, ignore_eos=True),
        SamplingParams(seed=2, top_k=5, min_p=0.01, max_tokens=3, ignore_eos=True),
        SamplingParams(
            seed=3, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 2.0}, max_tokens=3, ignore_eos=True
        ),
    ]
    with on_the_device(tiny.save(name, tmp_path), truth, device, graphs=graphs, drafts=drafts) as (engine, _):
        device.waits.clear()
        for index, sampling in enumerate(asked):
            engine.add_request(made_request(f"r{index}", range(5, 8 + index), sampling))
            engine.step()
        run_to_the_end(engine)
        again = made_request("again", range(5, 11), greedy(3))  # begins with what is cached: states are copied
        run_to_the_end(engine, again)
        assert waits_of_steps(device) == {ORDINARY}


@pytest.mark.parametrize("drafts", [2, *more([0])])
def test_no_step_with_grammars_makes_the_host_wait_for_the_device(drafts: int, path: Path, truth: Truth) -> None:
    device = FakeDevice()
    with on_the_device(path, truth, device, graphs=False, drafts=drafts) as (engine, _):
        grammars = engine.runner.grammars
        assert grammars is not None
        grammars.prepare(GRAMMAR)
        device.waits.clear()
        tokens = run_to_the_end(
            engine,
            made_request("free", [5, 6, 7], greedy(6)),
            made_request(
                "bound", [5, 6, 7], SamplingParams(seed=1, grammar=GRAMMAR, max_tokens=12, stop_token_ids=[END])
            ),
        )
        assert backend().decode(tokens["bound"]).strip() in {f"ab{one}-ab{other}" for one in "cd" for other in "cd"}
        assert waits_of_steps(device) == {ORDINARY}


def test_no_step_with_adapters_makes_the_host_wait_for_the_device(path: Path, truth: Truth) -> None:
    """The first step with an adapter copies it; later ones wait for nothing."""
    one, other = (adapter(path, name, seed) for seed, name in enumerate(("one", "other")))
    device = FakeDevice()
    with on_the_device(path, truth, device, graphs=False, adapters=[one, other]) as (engine, _):
        for turn in range(2):
            device.waits.clear()
            tokens = run_to_the_end(
                engine,
                made_request(f"base-{turn}", [5, 6, 7], greedy(6)),
                made_request(f"one-{turn}", [5, 6, 7], greedy(6), lora=one.identity),
                made_request(f"other-{turn}", [5, 6, 7], greedy(6), lora=other.identity),
            )
        assert len({tuple(answer) for answer in tokens.values()}) == 3
        assert tokens["base-1"] == truth.of([5, 6, 7])[0][:6]
        assert waits_of_steps(device) == {ORDINARY}


GRAMMAR = 'start: word "-" word\nword: "ab" ("c" | "d")'
RANK = 4


def adapter(path: Path, name: str, seed: int) -> Adapter:
    """An adapter of every projection that a layer's attention has, with random numbers."""
    random = torch.Generator().manual_seed(seed)
    config = read_config(find_source(str(path)))
    size, of_heads = config.hidden_size, config.hidden_size // config.num_attention_heads
    outputs = {
        "q_proj": size,
        "k_proj": of_heads * config.num_key_value_heads,
        "v_proj": of_heads * config.num_key_value_heads,
    }
    updates = {
        f"model.layers.{layer}.self_attn.{projection}": LayerUpdate(
            torch.randn(RANK, size, generator=random) * 0.3, torch.randn(count, RANK, generator=random) * 0.3
        )
        for layer in range(config.num_hidden_layers)
        for projection, count in outputs.items()
    }
    return Adapter(name, f"{seed}" * 64, updates)


def run_to_the_end(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    for _ in range(40):
        for update in engine.step().updates:
            assert update.error is None
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    assert not engine.scheduler.has_work()
    return tokens


def waits_of_steps(device: FakeDevice) -> set[str]:
    return {wait for wait in device.waits if not wait.startswith(OF_THE_MODEL)}
