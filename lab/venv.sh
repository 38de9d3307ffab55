#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: lab/venv.sh DIR demo|dev
# demo: what `make demo` needs, a small download; dev: what all else needs, and that as well.
# Says in one line what is missing when this machine cannot.
set -euo pipefail
dir=${1:?usage: lab/venv.sh DIR demo|dev}
extra=${2:?usage: lab/venv.sh DIR demo|dev}

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
case $extra in demo) takes="half a minute" ;; *) takes="about a minute" ;; esac
echo "plimsoll: setting up $dir (once; $takes)" >&2
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extra]" ||
  say "pip could not install what is needed; its message is above"
# Compiled as pip would compile an installed package, also where PYTHONDONTWRITEBYTECODE is set.
"$dir/bin/python" -m compileall -q src/plimsoll
touch "$dir/.small"
[ "$extra" = demo ] || touch "$dir/.ready"
