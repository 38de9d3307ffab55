"""Read which fields the objects of operators have, from packages that carry their CRDs, into tests/captures/crds.json.

    npm pack @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/gateway-api@2.0.0    # then unpack each
    python -m lab.kubernetes.crds FOLDER...

Only names and nesting are kept. A leaf, or a type of Kubernetes itself, is null; a list has one entry; `*` stands for any key.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CAPTURE = Path(__file__).resolve().parents[2] / "tests" / "captures" / "crds.json"
KINDS = {
    "PodMonitor": "monitoring.coreos.com/v1", "PrometheusRule": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}  # fmt: skip
# No package carries these; from a reference (llm-d.ai/docs/api-reference/inferencepool) and from Go types: kserve/kserve,
# pkg/apis/serving/v1alpha1/llm_inference_service_types.go, and kedacore/keda, apis/keda/v1alpha1/scaledobject_types.go.
_WORKLOAD = "replicas scaling parallelism labels annotations template worker rolloutStrategy".split()
BY_HAND: dict[str, dict[str, Any]] = {
    "InferencePool": {
        "selector": {"matchLabels": {"*": None}}, "targetPorts": [{"number": None}], "appProtocol": None,
        "endpointPickerRef": {"group": None, "kind": None, "name": None, "port": {"number": None}, "failureMode": None},
    },
    "LLMInferenceService": {
        **dict.fromkeys([*_WORKLOAD, *"runtime trustRemoteCode storageInitializer tracing baseRefs".split()]),
        "model": dict.fromkeys("uri name criticality lora".split()), "prefill": dict.fromkeys(_WORKLOAD),
        "router": dict.fromkeys("route gateway ingress scheduler".split()),
    },
    "ScaledObject": {
        **dict.fromkeys("pollingInterval initialCooldownPeriod cooldownPeriod idleReplicaCount minReplicaCount "
                        "maxReplicaCount fallback".split()),
        "scaleTargetRef": dict.fromkeys("name apiVersion kind envSourceContainerName".split()),
        "advanced": {"horizontalPodAutoscalerConfig": dict.fromkeys(["behavior", "name"]),
                     "restoreToOriginalReplicaCount": None, "scalingModifiers": None},
        "triggers": [
            dict.fromkeys("type name useCachedMetrics authenticationRef metricType".split()) | {"metadata": {"*": None}}
        ],
    },
}  # fmt: skip
TOP = dict.fromkeys(("apiVersion", "kind", "metadata", "status"))
_FIELD = re.compile(r'\s*"?(\[key: string\]|[\w$-]+)"?\??:\s*')


class Declarations:
    """The first interface of each `.d.ts` file, and those that it names in the same package."""

    def __init__(self, file: Path) -> None:
        text = re.sub(r"/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        self._imports = {name: file.parent / path.replace(".js", ".d.ts") for name, path in
                         re.findall(r'import \{ (\w+) \} from "(\.[^"]+)"', text)}  # fmt: skip
        found = re.search(r"export (?:interface \w+(?: extends ([\w, ]+))? |type \w+ = )(?=\{)", text)
        self._bases = [] if found is None else re.split(r", ", found.group(1) or "")
        self._body = "" if found is None else text[found.end() :]

    def fields(self) -> Any:
        """The tree of fields; None for a type that is no object."""
        if not self._body:
            return None
        tree, _ = self._object(1)
        for base in self._bases:
            tree |= self._named(base) or {}
        return tree

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        tree: dict[str, Any] = {}
        while found := _FIELD.match(self._body, at):
            value, at = self._type(found.end())
            tree["*" if found.group(1).startswith("[") else found.group(1)] = value
        return tree, self._body.index("}", at) + 1

    def _type(self, at: int) -> tuple[Any, int]:
        if self._body.startswith("Array<", at):
            value, at = self._type(at + len("Array<"))
            return [value], self._body.index(";", at) + 1 if self._body[at] != ">" else self._after(at + 1)
        if self._body[at] == "{":
            value, at = self._object(at + 1)
            return value, self._after(at)
        end = re.compile(r"[;>]").search(self._body, at)
        assert end is not None
        value = self._named(self._body[at : end.start()].strip())
        return value, self._after(end.start())

    def _after(self, at: int) -> int:
        return at + 1 if self._body[at : at + 1] == ";" else at

    def _named(self, name: str) -> Any:
        return Declarations(self._imports[name]).fields() if name in self._imports else None


def main(folders: list[str]) -> None:
    """Write the capture."""
    made: dict[str, Any] = {kind: {**TOP, "spec": spec} for kind, spec in BY_HAND.items()}
    for kind, group in KINDS.items():
        (file,) = (path for folder in folders for path in Path(folder).rglob(f"{group}/{kind}.d.ts"))
        made[kind] = Declarations(file).fields() | {"apiVersion": None, "kind": None}
    CAPTURE.write_text(json.dumps(made, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
