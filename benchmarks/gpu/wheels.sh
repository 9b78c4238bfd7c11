#!/usr/bin/env bash
# For a GPU machine that reaches no network: what kit and its peers need there beside torch, as wheels in one folder.
#   benchmarks/gpu/wheels.sh FOLDER [PYTHON]               here, where there is a network; PYTHON is the other's, 3.12 if unsaid
#   WHEELS=FOLDER PYTHON=python3 benchmarks/gpu/run.sh     there, with this checkout and the folder copied
set -euo pipefail
folder="$(realpath -m "$1")"
version="${2:-3.12}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here="${PYTHON:-.venv/bin/python}"
mkdir -p "$folder"

platforms=()
for platform in manylinux_2_{28,27,24,17}_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$platform")
done
# All that they need but torch, what torch needs, and numpy: pip installs what lies in the folder and nothing else.
names=(pydantic pydantic_core annotated-types typing-inspection typing_extensions PyYAML
    typer click shellingham annotated-doc rich markdown-it-py mdurl Pygments
    huggingface_hub hf-xet httpx2 httpcore2 anyio h11 idna truststore tqdm packaging
    transformers tokenizers regex safetensors accelerate peft psutil xxhash
    hjson py-cpuinfo msgpack ninja einops megatron-core torchao bitsandbytes)
# The versions that kit is tested with. DeepSpeed is published as source; its ops are compiled on the other machine.
exact=()
for name in "${names[@]}"; do exact+=("$(grep -i "^$name==" constraints.txt)"); done
"$here" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]}" -d "$folder" "${exact[@]}" liger-kernel
DS_BUILD_OPS=0 "$here" -m pip wheel -q --no-deps --no-build-isolation -w "$folder" "$(grep -i '^deepspeed==' constraints.txt)"
du -ch "$folder"/*.whl | tail -1
