#!/usr/bin/env bash
# Runs the tests that tell whether another release of megatron-core is as we need it: the contract
# (every name we hook into, replace or call) and real Megatron runs that switch. The release goes
# into a folder of its own, .venv/megatron-core-VERSION, which comes before the environment's own.
#
#   scripts/test_megatron.sh            # 0.18.2
#   scripts/test_megatron.sh 0.19.0 -x  # any release; further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
version=${1:-0.18.2}
shift $(($# > 0))
"$root/scripts/setup.sh"
cd "$root"
python=.venv/bin/python
folder=.venv/megatron-core-$version

if [[ ! -d $folder ]]; then
  unfinished=$(mktemp -d .venv/megatron-core.XXXXXX)
  trap 'rm -rf "$unfinished"' EXIT
  # Without what it depends on: that is there, in the versions that the tests run with.
  "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile \
    --target "$unfinished" "megatron-core==$version"
  chmod 755 "$unfinished"
  mv "$unfinished" "$folder"
fi

export PYTHONPATH=$root/$folder${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
found=$("$python" -c '
import importlib.util, pathlib, runpy
core = pathlib.Path(importlib.util.find_spec("megatron.core").origin).parent
print(runpy.run_path(str(core / "package_info.py"))["__version__"])')
if [[ ${found%%+*} != "$version" ]]; then # what follows + names the commit it was built from
  echo "test_megatron.sh: megatron-core $found is imported instead of $version" >&2
  exit 1
fi

exec "$python" -m pytest -p no:cacheprovider \
  tests/plugin/test_contract.py tests/platform/test_table.py tests/elastic/test_contract.py \
  "tests/host/test_losses.py::test_losses_of_other_states_equal_the_static_run[counted in samples]" \
  "$@"
