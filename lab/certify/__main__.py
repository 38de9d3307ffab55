"""Certifies the commands of commands.json, and writes the ones to be tried on a GPU with requests made from their own answers.

    python -m lab.certify [--only NAME] [--h200 lab/certify/h200.json]

For each: certified or not, the smallest request of each open kind, and the flag that closes it. With --h200, the commands
marked `tried` become servers with two lists of requests: `inside`, 0.9 of the smallest and what every step is said to hold;
`outside`, 1.5 times the smallest. Models that are not in the catalogue are those of lab/gpu/failure_runs.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.gpu.models import config_of
from plimsoll.cli.main import parse
from plimsoll.errors import PlimsollError
from plimsoll.plan.certify import Certificate, Kind, smallest_request
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "gpu" / "failure_runs.json"
Entry = dict[str, Any]
# Shares of the smallest request that does it.
INSIDE, OUTSIDE = 0.9, 1.5


def write_models(folder: Path) -> set[str]:
    """The configurations of the GPU lab's models, a folder each."""
    models = json.loads(MODELS.read_text(encoding="utf-8"))["models"]
    for name in models:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config_of(models, name)), encoding="utf-8")
    return set(models)


def certified(entry: Entry, models: Path, own: set[str]) -> Certificate:
    """The certificate of one entry."""
    model = str(models / entry["model"]) if entry["model"] in own else entry["model"]
    words = ["--gpu", entry["gpu"], "--vllm", entry["vllm"]]
    words += ["--used-gib", entry["used_gib"]] if "used_gib" in entry else []
    words += ["--", "env", *(f"{name}={value}" for name, value in entry.get("env", {}).items())]
    words += ["vllm", "serve", model, *entry["args"]]
    return read_command(parse(ServerOptions, words), learned=False).certify()


def request_of(kind: Kind, share: float, certificate: Certificate) -> Entry | None:
    """A request, or several at once, with this share of the smallest that does it; None where a client cannot be told so.

    Where any request of a kind does it, the longest one is the one outside, and none is inside.
    """
    units, longest = int((kind.smallest or 0) * share), certificate.step.batch.context - 8
    if kind.smallest == 1:
        if share < 1:
            return None
        units = longest
    row: Entry = {"prompt_tokens": 16, "prompt_logprobs": None, "logprobs": None, "n": 1, "max_tokens": 4}
    if kind.phase.kind == "prompt_logprobs":
        return row | {"prompt_tokens": min(units, longest), "prompt_logprobs": 20}
    if kind.phase.kind == "batch":
        count = -(-units // longest)
        return row | {"prompt_tokens": units // count, "n": count}
    if kind.phase.kind == "sampling":
        return row | {"n": min(units, certificate.ledger.settings.max_num_seqs), "max_tokens": 64, "logprobs": 20}
    return None


def plain_load(certificate: Certificate) -> Entry:
    """Requests that fill steps without asking for anything that is open."""
    settings, kinds = certificate.ledger.settings, {kind.phase.kind for kind in certificate.open_kinds}
    tokens = certificate.step.batch.context // 2
    if "batch" in kinds or "sampling" in kinds:
        return {"prompt_tokens": 64, "prompt_logprobs": None, "logprobs": None, "n": 4, "max_tokens": 16}
    asks = 1 if "prompt_logprobs" not in kinds else None
    count = min(48, settings.max_num_seqs)
    return {"prompt_tokens": tokens, "prompt_logprobs": asks, "logprobs": 20, "n": count, "max_tokens": 16}


def trial(entry: Entry, certificate: Certificate) -> Entry:
    """A server for the GPU with the requests that must not fail it, and those that may."""
    inside = [plain_load(certificate), *_requests(INSIDE, certificate)]
    if certificate.certified:
        longest = certificate.step.batch.context - 8
        inside.append({"prompt_tokens": longest, "prompt_logprobs": 20, "logprobs": 20, "n": 4, "max_tokens": 4})
    return {
        "name": entry["name"], "model": entry["model"], "args": entry["args"], "env": entry.get("env", {}),
        "gpu": entry["gpu"], "certified": certificate.certified, "inside": inside,
        "outside": _requests(OUTSIDE, certificate),
    }  # fmt: skip


def _requests(share: float, certificate: Certificate) -> list[Entry]:
    made = [request_of(kind, share, certificate) for kind in certificate.open_kinds]
    return [request for request in made if request is not None]


def line_of(entry: Entry, certificate: Certificate) -> str:
    """One command's answer in a line."""
    name = f"{entry['name']:<26}"
    if certificate.certified:
        return f"{name} certified       {certificate.spare / 2**30:8.2f} GiB spare"
    reasons = [f"{smallest_request(kind)} [{kind.closes or '-'}]" for kind in certificate.open_kinds]
    reasons += [f"not known: {unknown.reason}" for unknown in certificate.unknown]
    reasons += [] if certificate.ledger.fits else ["does not fit"]
    return f"{name} not certified   {'; '.join(reasons)}"


def main(arguments: list[str]) -> int:
    """Certify all, print a line each and the count, write the trials if asked."""
    parser = argparse.ArgumentParser(description="Certify the commands of commands.json.")
    parser.add_argument("--only", default="")
    parser.add_argument("--h200", type=Path)
    options = parser.parse_args(arguments)
    entries: list[Entry] = json.loads((HERE / "commands.json").read_text(encoding="utf-8"))
    chosen = [entry for entry in entries if options.only in ("", entry["name"])]
    trials, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        own = write_models(Path(folder) / "models")
        for entry in chosen:
            try:
                certificate = certified(entry, Path(folder) / "models", own)
            except PlimsollError as error:
                print(f"{entry['name']:<26} {error}")
                continue
            count += certificate.certified
            print(line_of(entry, certificate))
            if entry.get("tried"):
                trials.append(trial(entry, certificate))
    print(f"{count} of {len(chosen)} certified")
    if options.h200:
        rows = ",\n".join(f" {json.dumps(row)}" for row in trials)
        options.h200.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
