#!/bin/sh
# Answers as kubectl would of one pod, and writes down what it was asked.
printf "%s\n" "$*" >> "$ASKED"
case " $* " in
  *" gone "*) echo 'Error from server (NotFound): pods "gone" not found' >&2; exit 1;;
  *" describe "*) cat <<'END'
Name:             chat-0
Namespace:        models
Containers:
  vllm:
    State:          Running
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
    Restart Count:  3
END
  ;;
  *" logs "*) echo 'INFO 01-12 08:10:00 [api_server.py:100] vLLM API server version 0.32.0';;
  *" get events "*) echo 'LAST SEEN   TYPE      REASON    OBJECT       MESSAGE'
    echo '2m          Warning   BackOff   pod/chat-0   Back-off restarting failed container';;
  *" guardctl "*) echo "models/chat-0  critical"; exit 1;;
  *" exec -i "*) cat > /dev/null; echo read;;
esac
