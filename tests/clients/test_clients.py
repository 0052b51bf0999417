"""Other projects' clients and load generators, unchanged, against a real `tandem serve`: `make test-clients`.

Each set has an environment of its own under build/ (their versions of one library differ, and none is ours). What is not
installed is skipped, and the reason says how it is.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import PROGRAMS
from tests.integration.cluster_lab import START_S, Serve

ROOT = Path(__file__).resolve().parents[2]
PLACES = Path(os.environ.get("TANDEM_CLIENTS", ROOT / "build"))
MODEL = "SmolLM2-135M-Instruct"
REQUESTS = 4
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    """One prefill and one decode node. The model was not trained for vectors, but makes some."""
    serve = Serve(
        "--prefill", "1", "--decode", "1", "--dtype", "float32", "--kv-memory", "512MiB", "--set", "model.pooling=mean"
    )
    try:
        yield serve.until(r"^API: +(http://\S+)/v1$", START_S)[1]
        serve.process.terminate()
        assert serve.ended() == 0
    finally:
        serve.kill_all()


def program(place: str, name: str) -> str:
    found = PLACES / place / "bin" / name
    if not found.exists():
        pytest.skip(f"{found} is not there: `make test-clients` installs it")
    return str(found)


def run(folder: Path, *command: object) -> str:
    environment = {
        **os.environ,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.parametrize("name", [program.__name__ for program in PROGRAMS])
def test_a_client(url: str, tmp_path: Path, name: str) -> None:
    python = program("litellm" if name == "litellm" else "clients", "python")
    run(tmp_path, python, "-P", Path(__file__).parent / "programs.py", name, url, MODEL)


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
def test_aiperf(url: str, tmp_path: Path, smollm2_path: Path, endpoint: str) -> None:
    run(
        tmp_path, program("aiperf", "aiperf"), "profile", "--model", MODEL, "--url", url, "--endpoint-type", endpoint,
        "--streaming", "--tokenizer", smollm2_path, "--request-count", REQUESTS, "--concurrency", 2,
        "--prompt-input-tokens-mean", 50, "--prompt-output-tokens-mean", 10, "--ui-type", "none",
        "--output-artifact-dir", tmp_path,
    )  # fmt: skip
    (export,) = tmp_path.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(export.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert not found.get("error_summary")


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(url: str, tmp_path: Path, smollm2_path: Path, endpoint: str) -> None:
    run(
        tmp_path, program("guidellm", "guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={endpoint}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={smollm2_path}",
        "--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=10",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_bench(url: str, tmp_path: Path, smollm2_path: Path, backend: str) -> None:
    vllm = os.environ.get("VLLM", "")
    if not vllm:
        pytest.skip("VLLM=/path/to/vllm names it: it is gigabytes, and not installed here")
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    run(
        tmp_path, vllm, "bench", "serve", "--backend", backend, "--base-url", url, "--endpoint", path,
        "--model", MODEL, "--tokenizer", smollm2_path, "--dataset-name", "random", "--random-input-len", 50,
        "--random-output-len", 10, "--num-prompts", REQUESTS, "--max-concurrency", 2, "--ignore-eos",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == REQUESTS
    assert found["total_output_tokens"] == 10 * REQUESTS
