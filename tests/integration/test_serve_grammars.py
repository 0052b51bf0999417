"""`tandem serve` with a schema: its keys are checked several tokens at a time, on the node that decodes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema

from tests.integration.cluster_lab import PATIENCE_S, START_S
from tests.waiting import until

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "maxItems": 2},
    },
    "required": ["first_name", "age_in_years", "likes"],
    "additionalProperties": False,
}


def test_what_a_schema_forces_takes_no_steps_of_its_own(serve: Any) -> None:
    command = serve("--prefill", "1", "--decode", "1", "--kv-memory", "512MiB")
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        body = {
            "messages": [{"role": "user", "content": "Describe a person named Ada, aged 36, as JSON."}],
            "max_tokens": 100, "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        }  # fmt: skip
        choice = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)

        def counted(metric: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            of_node = f'tandem_node_{metric}_total{{model_name="SmolLM2-135M-Instruct",node="decode-0"'
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(of_node))

        until(lambda: counted("grammar_tokens_forced") > 3, PATIENCE_S)
        assert counted("decode_steps") < counted("output_tokens")
        assert counted("model_flops") > 1e9
        assert counted("model_bytes") > 1e9
