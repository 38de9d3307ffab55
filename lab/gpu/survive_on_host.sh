#!/usr/bin/env bash
# measure_survive.py on a GPU host that has Python 3.12 and torch but no vLLM and no network: one step of it a call.
#
#   survive_on_host.sh part FOLDER LAB   put one part of the packed vLLM (part.*, zs/, unpack.sh) into LAB; once for each part
#   survive_on_host.sh unpack LAB        put the parts together: LAB/env.sh then makes vLLM importable
#   survive_on_host.sh run LAB ARGS...   python3 -m lab.gpu.measure_survive ARGS... --work LAB/work, results in $OUT
#
# From the root of the repository, in this order, each as soon as the last has ended:
#   part carry/aa LAB; part carry/ab LAB; part carry/ac LAB; part carry/ad LAB && unpack LAB
#   run LAB small --budget-s 540
#   run LAB 8b --budget-s 480
#   run LAB rest trial overhead --budget-s 560
# The last part, unpacking and the first run may be one call. What a call had no time for is left for the next, with the same
# stages again: runs that have a result in LAB/work, or in lab/results/survive-h200, are not made twice.
set -euo pipefail
step="${1:?usage: survive_on_host.sh part|unpack|run ...}"
shift
case "$step" in
part)
    mkdir -p "$2"
    cp -r "$1"/. "$2"/
    ;;
unpack)
    time bash "$1/unpack.sh" "$1" >&2
    rm -f "$1"/part.* "$1/site.tar.zst"
    ;;
run)
    lab="$1"
    shift
    set +u
    . "$lab/env.sh"
    set -u
    export PYTHONPATH="$PWD:$PWD/src:$PYTHONPATH"
    ulimit -n "$(ulimit -Hn)"
    nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv,noheader
    exec python3 -m lab.gpu.measure_survive "$@" --work "$lab/work"
    ;;
*)
    echo "survive_on_host.sh: no step $step" >&2
    exit 2
    ;;
esac
