"""The native library beside the same weights in float32, for each form in which weights have fewer bits: accuracy and memory.

    python -m benchmarks.weight_bits MODEL [--forms NAMES] [--dtype bfloat16] [--limit avx2] [--prompts 20] [--json FILE]

MODEL is a local folder of the Llama family. Its matrices, the embedding excepted, are rounded to each form: those of a quantized checkpoint
are written to a folder and read from it, those of GGUF are given to the library as blocks. The weights that a form defines, in float32 in
transformers, answer the prompts greedily, and the library reads prompts and answers: how far its probabilities differ (KL divergence, in
nats), and how many answers it would have given, too. Where one parts, the table has the reference's margin between the two tokens.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.tables import table_of
from benchmarks.native_kernels import BLOCK_SIZE, load, make_batch
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.memory import allocate_cache
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.native.forward import Checkpoint, NativeLlamaForward
from tandem.engine.model.source import find_source
from tandem.kernels import library
from tandem.kernels.library import BlockRows, Weights
from tests.engine.model.quantized_files import FORMATS
from tests.kernels.block_rows import GGUF

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def k_blocks(weights: Floats, kind: GGMLQuantizationType) -> Bytes:
    """[rows, inputs], which blocks of 256 divide, as [rows, bytes]."""
    blocks = weights.reshape(-1, 256)
    made = _q6(blocks) if kind == GGMLQuantizationType.Q6_K else _q4_or_q5(blocks, int(kind.name[1]))
    return made.reshape(weights.shape[0], -1)


def _q4_or_q5(blocks: Floats, bits: int) -> Bytes:
    groups, most = blocks.reshape(-1, 8, 32), 2**bits - 1
    least = groups.min(2).clip(max=0)
    scale, scales = _steps((groups.max(2).clip(min=0) - least) / most, 63)
    minimum, minima = _steps(-least, 63)
    quants = _quants(groups + _wide(minimum, minima)[..., None], _wide(scale, scales)[..., None], most)
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    steps = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
    fifth = [(quants >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)] if bits == 5 else []
    low = quants & 15
    return np.concatenate(
        [scale.view(np.uint8), minimum.view(np.uint8), *steps, *fifth, (low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128)], axis=1
    )  # fmt: skip


def _q6(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    scale, scales = _steps(np.abs(groups).max(2) / 31, 127)
    of = _wide(scale, scales)[..., None]
    quants = _quants(groups + 32 * of, of, 63).reshape(-1, 2, 4, 32)
    low, high = quants & 15, quants >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.concatenate(
        [
            (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128),
            high.sum(2, dtype=np.uint8).reshape(-1, 64),
            scales.astype(np.uint8),
            scale.view(np.uint8),
        ],
        axis=1,
    )


def _steps(values: Floats, most: int) -> tuple[npt.NDArray[np.float16], Floats]:
    """A half for each block, and how often each group has it."""
    half = (values.max(1, keepdims=True) / most).astype(np.float16)
    return half, np.rint(values / np.maximum(half.astype(np.float32), 1e-8)).clip(0, most)


def _wide(half: npt.NDArray[np.float16], steps: Floats) -> Floats:
    return half.astype(np.float32) * steps


def _quants(values: Floats, scales: Floats, most: int) -> Bytes:
    return np.rint(values / np.maximum(scales, 1e-12)).clip(0, most).astype(np.uint8)


# Checkpoints whose integers the library keeps; their groups are of 64, which divide more models than 128.
CHECKPOINTS = ("compressed-int8", "compressed-4bit", "compressed-4bit-zeros", "awq", "gptq", "gptq-8bit-v2")
GROUP = 64
ANSWER = 24
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One, two, three, four, five, six. One, two, three, four,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "In 1969, the first humans to walk on the moon",
    "SELECT name, age FROM users WHERE",
    "Once upon a time, in a village by the sea, there lived",
    "The derivative of x squared with respect to x is",
    "Ingredients for pancakes: flour, eggs,",
    "Photosynthesis is the process by which plants",
    "Question: How many legs does a spider have?\nAnswer:",
    "To install the package, run the following command:\n\n",
    "The main difference between a list and a tuple in Python is that",
    "She opened the door slowly and saw",
    "According to the theory of relativity,",
    "Translate to French: Good morning, my friend.\n",
    "The largest planet in our solar system is",
    "A good way to learn a new language is to",
)


class FormFigures(msgspec.Struct, frozen=True):
    name: str
    matrix_megabytes: float  # size of the packed matrices, with the head
    mean_kl: float
    largest_kl: float
    tokens: int
    same_answers: int
    answers: int
    margins: list[float]  # where an answer parts


Matrices = dict[str, torch.Tensor]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--forms", default=",".join((*CHECKPOINTS, *GGUF)), help="%(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--limit", default="", help="no instruction set better than this one")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    reference = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[: options.prompts]]
    found = []
    for name in options.forms.split(","):
        say(f"{name} …")
        with tempfile.TemporaryDirectory() as folder:
            forward, weights = made(name, options, dtype, Path(folder))
            with torch.no_grad():
                for key, values in weights.items():
                    reference.get_parameter(key).copy_(values)
            found.append(compared(name, forward, reference, prompts, dtype))
            say(str(found[-1]))
            forward.close()
    rows = [
        {
            "form": each.name,
            "matrices": f"{each.matrix_megabytes:.0f} MB",
            "mean KL": f"{each.mean_kl:.1e}",
            "largest KL": f"{each.largest_kl:.1e}",
            "same answers": f"{each.same_answers} of {each.answers}",
            "margins where they part": ", ".join(f"{margin:.3f}" for margin in each.margins),
        }
        for each in found
    ]
    unit = library.instruction_set(dtype, options.limit)
    return report(options, found, table_of(f"{options.dtype} by {unit}; {found[0].tokens} tokens", rows))


def made(name: str, options: Any, dtype: torch.dtype, folder: Path) -> tuple[NativeLlamaForward, Matrices]:
    """The library's model, and the float32 weights that its form defines."""
    if name in CHECKPOINTS:
        weights = write_checkpoint(name, options.model, folder)
        source = find_source(str(folder))
        return load(source, read_config(source), options, dtype), weights
    take, weights = blocks_of(name, options.model)
    config = read_config(find_source(str(options.model)))
    forward = NativeLlamaForward(config, take, dtype=dtype, threads=options.threads, instruction_set=options.limit)
    return forward, weights


def matrices_in(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            yield name, tensor.float()


def write_checkpoint(name: str, model: Path, folder: Path) -> Matrices:
    written, rounded = FORMATS[name]
    tensors = load_file(model / "model.safetensors")
    weights = {}
    for key, values in matrices_in(model):
        parts, weights[key] = rounded(values, GROUP)
        del tensors[key]
        tensors |= {f"{key.removesuffix('weight')}{part}": each for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": written}))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (model / file).is_file():
            shutil.copy(model / file, folder)
    return weights


def blocks_of(kind: str, model: Path) -> tuple[Callable[[str], Weights | None], Matrices]:
    """Matrices whose rows end within a block stay as they are."""
    blocks, weights = {}, {}
    for name, values in matrices_in(model):
        weights[name] = values
        if values.shape[1] % library.BLOCKS[kind].weights == 0:
            form = gguf.GGMLQuantizationType[kind]
            data = (k_blocks if kind.endswith("K") else quantize)(values.numpy(), form)
            blocks[name] = BlockRows(np.ascontiguousarray(data), kind)
            weights[name] = torch.from_numpy(dequantize(data, form))
    checkpoint = Checkpoint(model)
    return lambda name: blocks.get(name) or checkpoint.take(name), weights


def compared(
    name: str, forward: NativeLlamaForward, reference: Any, prompts: list[list[int]], dtype: torch.dtype
) -> FormFigures:
    divergences: list[torch.Tensor] = []
    margins: list[float] = []
    for prompt, ids in zip(prompts, answered(reference, prompts), strict=True):
        with torch.inference_mode():
            theirs = reference(ids[None]).logits[0].log_softmax(-1)
        ours = logits_of(forward, reference.config, ids, dtype).log_softmax(-1)
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
        first = len(prompt) - 1
        parts = (ours[first:-1].argmax(-1) != ids[first + 1 :]).nonzero()
        if len(parts):
            at = first + int(parts[0])
            margins.append(float(theirs[at, ids[at + 1]] - theirs[at, ours[at].argmax()]))
    every = torch.cat(divergences)
    return FormFigures(
        name,
        forward.weight_bytes / 1e6,
        float(every.mean()),
        float(every.max()),
        len(every),
        len(prompts) - len(margins),
        len(prompts),
        margins,
    )


def answered(reference: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The prompts with their answers."""
    longest, end = max(map(len, prompts)), reference.generation_config.eos_token_id
    before = [longest - len(prompt) for prompt in prompts]
    rows = torch.tensor([[0] * pads + prompt for pads, prompt in zip(before, prompts, strict=True)])
    mask = torch.tensor([[0] * pads + [1] * (longest - pads) for pads in before])
    with torch.inference_mode():
        found = reference.generate(rows, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
    whole = []
    for pads, row in zip(before, found, strict=True):
        ends = torch.isin(row[longest:], torch.tensor(end)).nonzero()
        whole.append(row[pads : longest + int(ends[0]) + 1 if len(ends) else len(row)])
    return whole


def logits_of(forward: NativeLlamaForward, config: Any, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    a, count = describe(config), len(ids)
    blocks = -(-count // BLOCK_SIZE)
    layers = tuple(
        AttentionLayer(index, a.heads, a.kv_heads, a.head_dim, a.head_dim, None) for index in range(a.layers)
    )
    cache = allocate_cache(plan_cache(layers, BLOCK_SIZE), blocks + 1, dtype, torch.device("cpu"))
    forward.use_cache(cache, (KVCacheGroup(AttentionKind.FULL, BLOCK_SIZE, tuple(range(a.layers))),))
    batch = make_batch(a, 1, count, count, blocks)
    batch.token_ids.copy_(ids)
    return forward(dataclasses.replace(batch, logit_rows=torch.arange(count))).clone()


if __name__ == "__main__":
    run(main)
