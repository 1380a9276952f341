#!/usr/bin/env bash
# Sets the project up if needed, then runs the test suite; arguments go to pytest:
#   scripts/test.sh -m "not slow"        # the quick part
#   scripts/test.sh tests/cli -k table
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
# One thread for each rank: the tests start several ranks on few cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest "$@"
