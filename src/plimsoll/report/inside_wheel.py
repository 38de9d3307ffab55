"""What to do with the wheel that `plimsoll inside wheel` wrote: into a pod, into a container, into an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from plimsoll.engine.inside_command import FLAGS

WAYS = ("kubernetes", "docker", "pip")
_KUBERNETES = """\
Kubernetes, as a ConfigMap (its limit is 1 MiB; in a manifest, `kubectl apply` needs --server-side for it):

  kubectl create configmap plimsoll-inside --from-file={path}

  # in the pod's template
  spec:
    volumes:
      - name: plimsoll-inside
        configMap:
          name: plimsoll-inside
    containers:
      - name: vllm
        args: [..., "--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate"]
        env:
          - name: PYTHONPATH
            value: /plimsoll/{name}
          - name: PLIMSOLL_TOKEN  # kubectl create secret generic plimsoll --from-literal=token=...
            valueFrom:
              secretKeyRef:
                name: plimsoll
                key: token
        readinessProbe:
          httpGet: {{path: /plimsoll/ready, port: 8000}}
        volumeMounts:
          - name: plimsoll-inside
            mountPath: /plimsoll
            readOnly: true

Kubernetes, from an image of yours that has plimsoll, by an init container:

  spec:
    volumes:
      - name: plimsoll-inside
        emptyDir: {{}}
    initContainers:
      - name: plimsoll-inside
        image: YOUR-IMAGE-WITH-PLIMSOLL
        command: ["plimsoll", "inside", "wheel", "/plimsoll"]
        volumeMounts:
          - name: plimsoll-inside
            mountPath: /plimsoll
    containers:
      - name: vllm  # args, env and volumeMounts as above"""
_DOCKER = """\
Docker:

  docker run --gpus all --ipc=host -p 8000:8000 \\
    -v "$(realpath {path})":/plimsoll/{name}:ro \\
    -e PYTHONPATH=/plimsoll/{name} -e PLIMSOLL_TOKEN \\
    vllm/vllm-openai:TAG --model MODEL {flags}"""
_PIP = """\
pip, in the environment that has vLLM (not beside plimsoll-line, which holds the same modules):

  pip install --no-deps {path}
  vllm serve MODEL {flags}"""
_TEXTS = {"kubernetes": _KUBERNETES, "docker": _DOCKER, "pip": _PIP}


def wheel_text(path: str, size_bytes: int, sha256: str, ways: Sequence[str]) -> str:
    """Where it is, and the next steps."""
    name = path.rpartition("/")[2]
    steps = [_TEXTS[way].format(path=path, name=name, flags=" ".join(FLAGS)) for way in ways]
    return "\n\n".join([f"wrote {path}, {size_bytes:,} bytes\nsha256 {sha256}", *steps])


def wheel_json(
    path: str, size_bytes: int, sha256: str, members: Sequence[str], entry_points: Mapping[str, Mapping[str, str]]
) -> str:
    """One object, schema plimsoll.inside-wheel/1."""
    body = {
        "schema": "plimsoll.inside-wheel/1",
        "path": path,
        "bytes": size_bytes,
        "sha256": sha256,
        "members": list(members),
        "entry_points": entry_points,
    }
    return json.dumps(body, indent=2)
