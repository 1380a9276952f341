#!/usr/bin/env bash
# Shows in under 5 minutes what one GPU can show, and says so where there is none (exit code 0).
# Needs a Python with torch. What else is needed may come as wheels, without a network:
#
#   benchmarks/gpu_smoke.sh                        # this Python's packages
#   WHEELS=DIR benchmarks/gpu_smoke.sh             # megatron-core, hydra-core, … from DIR
#   PYTHON=/path/to/python benchmarks/gpu_smoke.sh --out result.json
#
# To fetch the wheels elsewhere: pip download --no-deps -d DIR megatron-core hydra-core omegaconf \
#   antlr4-python3-runtime rich markdown-it-py mdurl pygments (pip wheel for those without one)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-$(command -v python3 || true)}
[[ -x $root/.venv/bin/python && -z ${PYTHON:-} ]] && python=$root/.venv/bin/python
if [[ -z $python ]] || ! "$python" -c 'import torch' 2>/dev/null; then
  echo "gpu_smoke.sh: no Python with torch; name one: PYTHON=/path/to/python $0" >&2
  exit 1
fi
if [[ -n ${WHEELS:-} ]]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps \
    --find-links "$WHEELS" --target "$folder" "$WHEELS"/*.whl
  export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
timeout --signal=TERM 290 "$python" "$root/benchmarks/gpu_smoke.py" "$@"
