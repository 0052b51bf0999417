"""FlashInfer's own scheduler, compiled by nvcc and run without a GPU (`make test-gpu-kernels`): for the same bits it must choose one tile and
split nothing, whatever is in a step."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif("CUDA_HOME" not in os.environ, reason="nvcc is not installed: make test-gpu-kernels"),
    pytest.mark.slow,
]

# Arguments: whether the step is recorded, whether no keys are split, then each request's rows and pages. Prints the rows of a tile, whether keys
# are split, and the parts.
_PLAN = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <flashinfer/attention/scheduler.cuh>

int main(int count, char** words) {
  std::vector<int> rows{0}, pages{0};
  for (int i = 3; i < count; i += 2) {
    rows.push_back(rows.back() + atoi(words[i]));
    pages.push_back(pages.back() + atoi(words[i + 1]));
  }
  const int heads = 32, kv_heads = 8, dim = 128, page = 16, processors = 132;
  auto plan = flashinfer::PrefillSplitQOKVIndptr<int>(
      rows.data(), pages.data(), rows.back(), rows.size() - 1, heads, kv_heads, dim, page, 2 * processors / kv_heads,
      atoi(words[1]), -1, -1, atoi(words[2]), 0, false, dim, 2);
  printf("%u %d %u\n", std::get<3>(plan), (int)std::get<0>(plan), std::get<1>(plan));
}
"""
# A card of capability 9.0 (attributes 75 and 76) with 227 KB of shared memory.
_CARD = """
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaDeviceGetAttribute(int* value, int what, int device) {
  *value = what == 75 ? 9 : what == 76 ? 0 : 232448;
  return 0;
}
"""


def test_a_step_s_company_changes_no_tile(tmp_path: Path) -> None:
    found = importlib.util.find_spec("flashinfer")
    assert found is not None
    assert found.origin is not None
    data, cuda = Path(found.origin).parent / "data", Path(os.environ["CUDA_HOME"])
    include = [data / "include", *(data / "cccl" / part for part in ("cub", "libcudacxx/include", "thrust"))]
    (tmp_path / "plan.cu").write_text(_PLAN)
    (tmp_path / "card.c").write_text(_CARD)
    for command in (
        [cuda / "bin/nvcc", "-std=c++17", "-arch=sm_90a", "-cudart=none", "-w", *(f"-I{path}" for path in include),
         "-c", "plan.cu", "-o", "plan.o"],
        ["gcc", "-c", "card.c", "-o", "card.o"],
        ["g++", "plan.o", "card.o", cuda / "lib64/libcudart.so", f"-Wl,-rpath,{cuda}/lib", "-o", "plan"],
    ):  # fmt: skip
        subprocess.run(command, cwd=tmp_path, check=True)

    def planned(recorded: bool, whole: bool, requests: list[tuple[int, int]]) -> tuple[int, bool, int]:
        words = [str(int(recorded)), str(int(whole)), *(str(number) for each in requests for number in each)]
        said = subprocess.run([tmp_path / "plan", *words], capture_output=True, text=True, check=True).stdout
        tile, splits, parts = map(int, said.split())
        return tile, bool(splits), parts

    steps = [[(1, pages)] * count for count in (1, 7, 64, 512, 2048) for pages in (1, 100, 2048)]
    steps.append([(1, 2048), *[(1, 3)] * 40])
    for requests in steps:
        for recorded in (False, True):
            assert planned(recorded, True, requests) == (16, False, len(requests))
    # Left to itself it does neither.
    assert {planned(False, False, requests)[1] for requests in steps} == {False, True}
    assert {planned(False, True, [(rows, 128)])[0] for rows in (1, 5, 20)} == {16, 64, 128}
