#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: lab/venv.sh DIR
# Says in one line what is missing when this machine cannot.
set -euo pipefail
dir=${1:?usage: lab/venv.sh DIR}

say() { echo "plimsoll: $*" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null 2>&1 && usable "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  command -v python3 >/dev/null 2>&1 ||
    say "python3 is not installed; on Debian or Ubuntu: sudo apt-get install python3 python3-venv"
  say "$(python3 --version 2>&1) is too old, 3.11 or newer is needed; name one with PYTHON=/path/to/python3 make ..."
fi
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
  say "$("$python" --version 2>&1) has no venv module; on Debian or Ubuntu: sudo apt-get install python3-venv"

if ! "$dir/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
  rm -rf "$dir"
  "$python" -m venv "$dir"
fi
echo "plimsoll: setting up $dir (once; about a minute)" >&2
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]' ||
  say "pip could not install the development tools; its message is above"
# Compiled as pip would compile an installed package, also where PYTHONDONTWRITEBYTECODE is set.
"$dir/bin/python" -m compileall -q src/plimsoll
touch "$dir/.ready"
