"""vLLM by itself answers prompts. Run by vLLM's Python: `alone.py MODEL < questions.json` prints the tokens of each answer."""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    said = LLM(model=sys.argv[1], dtype="float32", generation_config="vllm", **asked["args"]).generate(
        [{"prompt_token_ids": prompt} for prompt in asked["prompts"]],
        SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    print(json.dumps([list(one.outputs[0].token_ids) for one in said]))
