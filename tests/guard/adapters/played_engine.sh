#!/bin/sh
# An engine behind a user's own commands: a sleeping process; what it was asked is written down.
cd "$(dirname "$0")"
echo "$PLIMSOLL_VERB $PLIMSOLL_DEADLINE_S" >> asked
case "$1" in
  start) sleep 60 > /dev/null 2>&1 & echo $! > pid; echo "on its way" ;;
  stop) kill "$(cat pid)"; rm pid; echo "hf_0123456789abcdefghijklmnopqrstuvwxyz0 is over" ;;
  is-running) test -e pid || exit 3 ;;
  pids) cat pid; echo nonsense -5 99999999999999999999 ;;
  hang) sleep 60 ;;
  lie) echo "all done" ;;
  [0-9]*) exit $1 ;;
  *) echo "what?"; exit 7 ;;
esac
