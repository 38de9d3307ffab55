"""What measure_survive.py does to a server: the rounds of a killer, the trial of a certificate, pairs for the overhead."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.gpu.survive_host import Host, Server, graphs_mib, told_in
from lab.gpu.survive_load import Answer, Request, Spec, compare_ids, kept_ids, play, requests_of, summary
from lab.paired import alternate, compared, serve_for
from lab.streams import Shape

DEATH_S = 6.0  # how long a server may take to show that it is dead
TRIAL_S = 60.0  # log-probabilities of long prompts are megabytes of JSON
TOGETHER_WITHIN_S = 15.0
REQUEST_S = 40.0  # what has not ended by then is lost; a round takes seconds
WARM: Spec = {"seed": 1, "bystanders": {"n": 4, "prompt": [100, 200], "out": [8, 16]}}
TWELVE: Spec = {"seed": 2, "bystanders": {"n": 12, "prompt": [64, 256], "out": [64, 64]}}
Row = dict[str, Any]


@dataclass(frozen=True)
class Killer:
    """One way to run out of memory, for one runner: what is sent, and how little memory is left."""

    load: Spec
    load_name: str
    flags: tuple[str, ...] = ()
    leave_mib: int = 0
    fault: Mapping[str, Any] = field(default_factory=dict)
    """On the CPU engine: the steps that fail."""
    kv_leave_mib: int = 0
    """Not a neighbour but its own KV cache takes the memory: all but this, before the server starts."""
    survive: str = ""
    """What PLIMSOLL_SURVIVE must be for this killer; empty for what the call says."""
    adapters: tuple[str, ...] = ()
    """Names under which the server has its adapter."""
    compacts: bool = False
    """Even the plain server has our probe, without containment: torch still has the memory that the killer takes."""


class Rounds:
    """The rounds on one server, and what they found; `row` is what is kept of them."""

    def __init__(self, host: Host, server: Server, killer: Killer, ids_home: Path, combination: str) -> None:
        self.host, self.server, self.killer = host, server, killer
        self.reference = ids_home / f"{killer.load_name}-{combination}.json"
        self.row: Row = {}

    def send(self, spec: Spec, salt: str) -> tuple[Row, list[Answer]]:
        """Play a load; what came of it."""
        requests = requests_of(spec, self.host.model_name, f"{self.server.name}-{salt}")
        began, answers = play(self.server.port, requests, REQUEST_S)
        return summary(began, answers), answers

    def keep(self, name: str, spec: Spec) -> list[Answer]:
        """Play a load and keep its summary under this name, with the failures contained meanwhile."""
        before = len(told_in(self.server.text())["failures"])
        found, answers = self.send(spec, name)
        contained = told_in(self.server.text())["failures"][before:]
        self.row[name] = found | {"contained": len(contained), "sites": sorted({one["site"] for one in contained})}
        return answers

    def undisturbed(self) -> None:
        """Twice the same requests with memory enough: what they cost, their tokens, and how far two such runs agree."""
        first = kept_ids(self.keep("undisturbed", self.killer.load))
        second = kept_ids(self.keep("undisturbed_again", self.killer.load))
        self.reference.parent.mkdir(exist_ok=True)
        self.reference.write_text(json.dumps(first), encoding="utf-8")
        self.row["undisturbed_twice"] = compare_ids(second, first)

    def compare(self, name: str, answers: list[Answer]) -> None:
        """Compare a round's tokens with the undisturbed run's, if there was one."""
        if self.reference.is_file():
            wanted = json.loads(self.reference.read_text(encoding="utf-8"))
            self.row[name]["tokens_as_undisturbed"] = compare_ids(kept_ids(answers), wanted)

    def squeeze(self) -> None:
        """Take the memory away, unless the server's own cache has it already."""
        if not self.killer.kv_leave_mib or self.host.is_cpu:
            self.row["squeeze"] = self.host.squeeze(self.server, self.killer.leave_mib, self.killer.fault)

    def note_steps(self, name: str) -> None:
        """Keep how large steps may be now: by the server's state, or by its log where it has none."""
        state = self.server.state()
        said = (state.get("tokens_per_step") or {}).get("now") if state else None
        self.row.setdefault("steps", {})[name] = said or told_in(self.server.text())["steps"]
        if state is not None:
            self.row["state"] = state


def play_rounds(rounds: Rounds, way: str, number: int) -> None:
    """Memory is short, killers come among bystanders, twelve more afterwards; round 1 of the contained way has more to it."""
    server, killer = rounds.server, rounds.killer
    is_first = way == "contained" and number == 1
    is_alone = killer.kv_leave_mib > 0
    rounds.send(WARM, "warm")
    if is_first and not is_alone:
        rounds.undisturbed()
    rounds.keep("before", TWELVE)
    if "prime" in killer.load:
        rounds.keep("prime", {"seed": 4, "bystanders": killer.load["prime"]})
    if server.is_ours:
        rounds.row["compacted"] = server.compact()
    rounds.note_steps("before")
    rounds.squeeze()
    answers = rounds.keep("round", killer.load)
    rounds.compare("round", answers)
    rounds.note_steps("round")
    lost = rounds.row["round"]["lost"]
    rounds.row["died"] = server.wait_dead(DEATH_S if lost else 0.3)
    rounds.keep("after", TWELVE)
    is_serving = rounds.row["after"]["served"] > 0  # one that hangs would take a minute for each further load
    if is_serving and is_first:
        rounds.compare("again", rounds.keep("again", killer.load))
        rounds.note_steps("again")
    rounds.host.release(server)
    if is_serving:
        rounds.keep("later", TWELVE)
        rounds.note_steps("later")
    rounds.row["told"] = told_in(server.text())
    rounds.row["graphs_mib"] = graphs_mib(server.text())


# The trial of a certificate


def trial_requests(part: Mapping[str, Any], model: str, salt: str) -> list[Request]:
    """The `n` requests of one line of a certificate's list, no two with a beginning in common."""
    asked = int(part.get("max_tokens") or 1)
    extra = {name: int(part[name]) for name in ("prompt_logprobs", "logprobs") if part.get(name) is not None}
    if "side" in part:
        spec = {"killers": {"n": int(part.get("n") or 1), "side": int(part["side"]), "out": [asked, asked], "extra": extra}}
        return requests_of(spec, str(part.get("model", model)), salt)
    body = {"model": part.get("model", model), "max_tokens": asked, "ignore_eos": True, "temperature": 0, **extra}
    made = []
    for number in range(int(part.get("n") or 1)):
        dice = random.Random(f"{salt} {number}")
        prompt = [dice.randrange(3, 2000) for _ in range(int(part["prompt_tokens"]))]
        made.append(Request(number, True, "/v1/completions", {**body, "prompt": prompt, "cache_salt": salt}, 0.0, asked))  # noqa: FBT003
    return made


def play_trial(host: Host, server: Server, entry: Mapping[str, Any], until: float) -> Row:
    """Requests inside the certificate, line by line and, if that was quick, all at once; then those outside, until it dies."""
    found: Row = {"certified": entry.get("certified"), "inside": [], "outside": []}
    model = host.model_name

    def send(parts: Sequence[Mapping[str, Any]], salt: str) -> list[Answer]:
        requests = [one for number, part in enumerate(parts) for one in trial_requests(part, model, f"{salt}-{number}")]
        return play(server.port, requests, max(5.0, min(TRIAL_S, until - time.monotonic())))[1]

    play(server.port, requests_of(WARM, model, "warm"), REQUEST_S)
    began = time.monotonic()
    for number, parts in enumerate((*([part] for part in entry["inside"]), entry["inside"])):
        if len(parts) > 1 and time.monotonic() - began > TOGETHER_WITHIN_S:
            continue
        statuses = [answer.status for answer in send(parts, f"inside-{number}")]
        found["inside"].append({"parts": len(parts), "sent": len(statuses), "failed": sum(code != 200 for code in statuses)})
    found["inside_failed"] = sum(one["failed"] for one in found["inside"])
    found["died_inside"] = found["inside_failed"] > 0 and server.wait_dead(DEATH_S)
    found["died_outside"] = False
    for number, part in enumerate(entry["outside"]):
        if found["died_inside"] or found["died_outside"]:
            break
        answers = send([part], f"outside-{number}")
        failed = [answer for answer in answers if answer.status != 200]
        found["died_outside"] = bool(failed) and server.wait_dead(DEATH_S)
        why = failed[0].wrong[:160] if failed else ""
        found["outside"].append({**part, "failed": len(failed), "died": found["died_outside"], "wrong": why})
    found["told"] = told_in(server.text())
    return found


# What it costs where nothing fails


def same_answers(host: Host, servers: Mapping[str, Server], spec: Spec) -> Row:
    """Whether both servers answer the same requests, one at a time, with the same tokens."""
    ids: dict[str, dict[str, list[int]]] = {}
    for name, server in servers.items():
        requests = requests_of(spec, host.model_name, "same")
        ids[name] = {}
        for request in requests:
            ids[name] |= kept_ids(play(server.port, [request], REQUEST_S)[1])
    return compare_ids(ids["with"], ids["without"]) | {"tokens": sum(map(len, ids["with"].values()))}


def play_overhead(host: Host, servers: Mapping[str, Server], spec: Mapping[str, Any], until: float, row: Row) -> None:
    """Pairs of the same load, with containment and without, turn by turn; fewer where time runs out."""
    shape = Shape(spec["clients"], tuple(spec["prompt"]), tuple(spec["output"]))
    seconds = float(spec["seconds"])
    row |= {"shape": shape._asdict(), "same_answers": same_answers(host, servers, spec["same"]), "runs": []}
    for server in servers.values():
        serve_for(server.port, host.model_name, shape, min(6.0, seconds))
    pairs_left = int((until - time.monotonic()) / (2 * (seconds + 3.0)))
    pairs = max(1, min(int(spec["pairs"]), pairs_left))

    def run(name: str, number: int) -> Row:
        found = serve_for(servers[name].port, host.model_name, shape, seconds, seed=number)
        row["runs"].append({"pair": number, "server": name, **found})
        return found

    result = compared(alternate(pairs, lambda n: run("with", n), lambda n: run("without", n)))
    row["result"] = result
    with contextlib.suppress(KeyError):
        row["told"] = told_in(servers["with"].text())
