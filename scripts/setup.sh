#!/usr/bin/env bash
# Makes .venv in the project's folder and installs the project with all that the CPU demo and the
# tests need. Run it as often as you like: when nothing changed it only says so, and after an
# interruption it goes on where it stopped. All messages go to standard error.
#
#   scripts/setup.sh              # finds a Python by itself
#   PYTHON=/path/to/python3.12 scripts/setup.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/dynatrain-setup.stamp
log=$venv/dynatrain-setup.log

say() { printf '[setup] %s\n' "$*" >&2; }
die() {
  say "error: $1"
  shift
  for line in "$@"; do say "       $line"; done
  exit 1
}

# What the environment was made from. The folder is part of it: the commands in .venv/bin name it.
wanted_stamp() {
  printf '%s\n' "$root"
  cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/setup.sh" | cksum
}

# True for a Python that runs, is new enough (and not newer than torch has wheels for), and can
# make environments. pyenv's shims exist for versions that are not active, so only running tells.
usable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  local name path
  if [[ -n ${PYTHON:-} ]]; then
    usable "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.12, 3.13 or 3.14 with venv." \
      "Unset PYTHON to let this script look for one."
    printf '%s\n' "$PYTHON"
    return
  fi
  for name in python3.12 python3.13 python3.14 python3; do
    while IFS= read -r path; do
      if usable "$path"; then
        printf '%s\n' "$path"
        return
      fi
    done < <(type -aP "$name" || true)
  done
  for name in 3.12 3.13 3.14; do
    for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$name"*/bin/python3; do
      if [[ -x $path ]] && usable "$path"; then
        printf '%s\n' "$path"
        return
      fi
    done
  done
}

make_venv() {
  local python
  python=$(find_python)
  if [[ -n $python ]]; then
    say "1/2 making .venv with $("$python" -c 'import platform; print("Python", platform.python_version())') ($python)"
    "$python" -m venv --clear "$venv"
  elif command -v uv >/dev/null 2>&1; then
    say "1/2 no Python 3.12 to 3.14 found; making .venv with uv, which may download Python 3.12"
    rm -rf "$venv"
    uv venv --quiet --seed --python 3.12 "$venv" || die "uv could not make the environment." \
      "Install Python 3.12 or newer and run scripts/setup.sh again."
  else
    die "no Python 3.12, 3.13 or 3.14 found on PATH or under pyenv, and no uv." \
      "Install one, for example with 'pyenv install 3.12' or your system's packages (python3.12 and" \
      "python3.12-venv), or name it: PYTHON=/path/to/python3.12 scripts/setup.sh"
  fi
}

install_project() {
  local status=0
  local -a pip=(
    "$venv/bin/python" -m pip --disable-pip-version-check install
    --constraint constraints.txt --editable '.[dev]'
  )
  cd "$root"
  say "2/2 installing the project and what it needs, in the versions of constraints.txt"
  say "    full log: .venv/${log##*/}"
  if ! compgen -G "$venv/lib/python3*/site-packages/torch" >/dev/null; then
    say "    torch and the CUDA libraries that come with it on Linux are the big part: about 3 GB"
    say "    to download the first time, 6 GB on disk; minutes on a fast line"
  fi
  if [[ -t 2 ]]; then
    "${pip[@]}" 2>&1 | tee "$log" >&2 || status=1
  else
    "${pip[@]}" --progress-bar off 2>&1 | tee "$log" | brief >&2 || status=1
  fi
  ((status == 0)) || die "installing failed; the last lines of the log:" "$(tail -n 12 "$log")" \
    "Mend the cause (often the network or a full disk) and run scripts/setup.sh again."
}

# pip's lines that tell how far it is, with the seconds since the start, and a sign of life when it
# says nothing for long, as while it unpacks the big packages.
brief() {
  local line status
  while true; do
    status=0
    IFS= read -r -t 20 line || status=$?
    if ((status > 128)); then
      printf '[setup] %4d s  still working\n' "$SECONDS"
    elif ((status != 0)); then
      return 0
    elif [[ $line =~ Downloading\ ([^-]+-[^-]+)-.*\(([0-9]{2,}\.[0-9]\ MB)\) ]]; then
      printf '[setup] %4d s  downloading %s (%s)\n' "$SECONDS" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    elif [[ $line == *"Installing collected packages"* ]]; then
      printf '[setup] %4d s  everything is here; unpacking\n' "$SECONDS"
    fi
  done
}

if [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp)" ]]; then
  say "environment is up to date (.venv)"
  exit 0
fi

# Two set-ups at once would undo each other's work; the second waits and then finds it done.
if command -v flock >/dev/null 2>&1; then
  exec 9<"$root/scripts/setup.sh"
  flock --nonblock 9 || { say "another set-up is running; waiting for it" && flock 9; }
  if [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp)" ]]; then
    say "environment is up to date (.venv)"
    exit 0
  fi
fi

if [[ -f $stamp && $(head -n 1 "$stamp") == "$root" ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "1/2 keeping .venv; pyproject.toml, constraints.txt or this script changed"
else
  make_venv
  # From here on the environment can be completed by a later run, so an interruption costs little.
  printf '%s\nincomplete\n' "$root" >"$stamp"
fi
install_project
wanted_stamp >"$stamp"
say "done in $SECONDS s; next: scripts/demo.sh, scripts/test.sh"
