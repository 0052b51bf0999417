"""A small model's folder, what it is asked, and what such a model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.api.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then it sleeps until the sun comes up again",
    "a prompt goes in and an answer comes out through the whole house",
    "zwei Füchse springen über den Zaun; naïve café déjà vu",
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a minimal byte-level BPE tokenizer: all bytes, some merges, three special tokens."""
    folder = tmp_path_factory.mktemp("model")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


class CountedBackend:
    """A tokenizer of the library that notes each text it is given."""

    def __init__(self, folder: str) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture(scope="session")
def tokenizer(model_folder: str) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }} write <tool_call>{...}</tool_call>\n{% endif %}" + CHAT_TEMPLATE
)

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("weather", {"city": "Paris"})


THOUGHT, SAID = "Is it Paris?\n\nIt is.", "It will rain."


# --- through the router ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def thinking_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "tokenizer.json").write_bytes((Path(model_folder) / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="session")
def folder_with_tools(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tokenizer.json").write_bytes((Path(model_folder) / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE_WITH_TOOLS)
    return str(folder)
