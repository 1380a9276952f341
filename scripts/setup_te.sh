#!/usr/bin/env bash
# Transformer Engine for the tests of tests/host/test_transformer_engine.py, on a machine without a
# GPU or CUDA: PyPI has its library, and its torch extension is compiled here from PyPI's source
# with the headers of NVIDIA's wheels. Takes 10 to 20 minutes on two cores, and 0.6 GB.
#
#     scripts/setup_te.sh FOLDER      # a virtual environment that sees .venv's packages
#     FOLDER/bin/python -m pytest tests/host/test_transformer_engine.py
set -euo pipefail
folder=${1:?usage: scripts/setup_te.sh FOLDER}
version=2.20.2
root=$(cd "$(dirname "$0")/.." && pwd)
if [ ! -x "$root/.venv/bin/python" ]; then
  echo "there is no .venv yet: run scripts/setup.sh first" >&2
  exit 1
fi
cuda=$("$root/.venv/bin/python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
if [ -z "$cuda" ]; then
  echo "Transformer Engine needs a CUDA build of torch; the one in .venv is none" >&2
  exit 1
fi
"$root/.venv/bin/python" -m venv "$folder"
folder=$(cd "$folder" && pwd)
base=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$base" >"$site/base.pth"
install=("$folder/bin/pip" install --quiet --no-deps --disable-pip-version-check)
"${install[@]}" einops onnxscript onnx onnx_ir ml_dtypes pydantic pydantic_core annotated_types \
  typing_inspection nvdlfw-inspect nvidia-cudnn-frontend nvidia-cuda-crt nvidia-cuda-cccl \
  setuptools wheel ninja
"${install[@]}" "transformer_engine==$version" "transformer_engine_cu$cuda==$version"
for each in "$base"/nvidia/*; do # the libraries, where Transformer Engine looks for them
  name=${each##*/}
  [ -e "$site/nvidia/$name" ] || ln -s "$each" "$site/nvidia/$name"
done
[ -e "$site/nvidia/cu$cuda/lib" ] || ln -s "$base/nvidia/cu$cuda/lib" "$site/nvidia/cu$cuda/lib"
headers=$site/include:$site/nvidia/cu$cuda/include:$site/nvidia/cu$cuda/include/cccl
for each in "$base"/nvidia/*/include; do
  headers=$each:$headers
done
CPATH=$headers CUDA_HOME=$base/nvidia/cu$cuda PATH=$folder/bin:$PATH \
  NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 MAX_JOBS=2 \
  "${install[@]}" --no-build-isolation "transformer_engine_torch==$version"
"$folder/bin/python" -c 'import torch, transformer_engine.pytorch' && echo "built in $folder"
