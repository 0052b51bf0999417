#!/usr/bin/env bash
# The GPU's benchmark on a machine with a card and without a network or a package registry.
#
#   gpu_away.sh pack FOLDER           here: FOLDER/site.tar.xz (some 30 MB), what such a machine lacks beside torch with CUDA 13, transformers,
#                                     nvcc, ninja and xxhash: FlashInfer's sources, NIXL and small packages, for its Python (PY=3.12)
#   gpu_away.sh run STAGE FOLDER OUT  there, from the repository's root: a stage of benchmarks.gpu in under ten minutes. Rows are appended to
#                                     OUT/rows.jsonl. Compiled kernels stay in ~/.cache, and go to OUT/kernels.* in pieces of 15 MB: put
#                                     these into FOLDER, and a later run need not compile. STAGE: 1, 2, 3, or parts with commas
set -euo pipefail

pack() {
  local out work
  out=$(mkdir -p "$1" && cd "$1" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # shellcheck disable=SC2046
  "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "${PY:-3.12}" --implementation cp --platform any \
    $(printf -- '--platform manylinux_2_%s_x86_64 ' 17 24 26 27 28 31 34 35) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    -d "$work/whl" 'flashinfer-python>=0.7,<0.8' nixl==1.5.1 nixl-cu13==1.5.1 msgspec cbor2 'llguidance>=1.9,<1.10' pyzmq tabulate \
    apache-tvm-ffi starlette uvicorn gguf
  "${PYTHON:-python3}" - "$work" <<'PY'
import re, sys, zipfile
from pathlib import Path
work = Path(sys.argv[1]); site = work / "site"; site.mkdir()
# Of FlashInfer the sources of paged attention and the headers that they include; of NIXL only UCX and POSIX.
kept = "batch_prefill|batch_decode|batch_mla|page|norm|rope|flashinfer_(page|norm|rope)|activation|tvm_ffi|fp8_blockscale_gemm_sm90"
folders = r"nv_internal/cpp/common/|nv_internal/tensorrt_llm/kernels/cutlass_kernels/fp8_blockscale_gemm/|fused_moe/cutlass_backend/deepgemm_jit"
drop = {
    "flashinfer": [rf"^flashinfer/data/csrc/(?!({kept})[^/]*$|{folders}|.*\.(h|inc|jinja|cuh)$)",
                   r"^flashinfer/data/cutlass/(?!include/|tools/util/include)", r"^flashinfer/data/cccl/(?!(cub|libcudacxx|thrust)/)",
                   r"^flashinfer/data/cccl/[^/]+/(test|benchmarks|examples|cmake)", r"^flashinfer/experimental/.*\.(cu|cuh|h)$",
                   r"^flashinfer/moe_ep/kernel_src"],
    "nixl_cu13": [r"\.data/", r"^nixl_ep_cu13/", r"^nixl_cu13\.scripts/", r"libucx_perftest", r"libplugin_(?!UCX|POSIX)",
                  r"lib(aws|azure|s2n)", r"\.la$"],
}
for wheel in sorted((work / "whl").glob("*.whl")):
    rules = next((found for name, found in drop.items() if wheel.name.startswith(name)), [])
    with zipfile.ZipFile(wheel) as opened:
        for item in opened.infolist():
            if not any(re.search(rule, item.filename) for rule in rules):
                opened.extract(item, site)
PY
  tar -C "$work" -cJf "$out/site.tar.xz" site
  ls -la "$out/site.tar.xz"
}

run() {
  local stage=$1 folder=$2 out=$3 site=${SITE:-/tmp/gpu-away} cache=~/.cache/flashinfer
  mkdir -p "$site" "$out"
  [ -d "$site/site" ] || tar -xJf "$folder/site.tar.xz" -C "$site"
  if [ ! -d "$cache" ] && ls "$folder"/kernels.* > /dev/null 2>&1; then
    mkdir -p ~/.cache && cat "$folder"/kernels.* | tar -xJf - -C ~/.cache
  fi
  export PYTHONPATH=$PWD:$site/site PYTHONUNBUFFERED=1
  local room=/dev/shm which=(--stage "$stage")
  [ -d "$room" ] || room=$site
  [[ $stage =~ ^[0-9]$ ]] || which=(--only "$stage")
  # shellcheck disable=SC2086
  timeout 570 python3 -m benchmarks.gpu "${which[@]}" --out "$out/rows.jsonl" --models "$room/gpu-models" ${FLAGS:-} 2>&1 | tee "$out/log" || true
  if [ -d "$cache" ] && [[ $stage == 1 ]]; then
    (cd ~/.cache && find flashinfer \( -name '*.so' -o -name build.ninja \) -print0 | tar --null -T - -cJf -) | split -b 15M - "$out/kernels."
  fi
}

case ${1:-} in
  pack) pack "${2:?a folder}" ;;
  run) run "${2:?a stage}" "${3:?the folder with site.tar.xz}" "${4:?a folder for what is found}" ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
