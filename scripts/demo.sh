#!/usr/bin/env bash
# Sets the project up if needed, then runs `dynatrain demo` with the arguments given:
# a real Megatron-LM job on 4 CPU ranks that changes its layout while it trains.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/dynatrain" demo "$@"
