"""The runs of measure_survive.py as survive_runs.json lists them: flags, loads, tables, and which servers share the GPU."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.survive_play import Killer

MIB = 1 << 20
WAVE = 10  # servers at once
SPARE_MIB = 16384  # kept free in a wave: log-probabilities of a whole prompt take 10 GiB where memory is enough
ON_CPU_FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "1024")
Entry = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One server of a stage: which killer, on what, which way, the how many-th time; or the trial of a certificate."""

    name: str
    killer: str
    shape: str
    mode: str
    runner: str
    way: str
    number: int
    prefix: str = ""
    trial: int = -1

    @property
    def combination(self) -> str:
        """What a run must share with another for their tokens to be comparable."""
        return f"{self.prefix}{self.shape}-{self.mode}-{self.runner}"


class Plan:
    """survive_runs.json and the certificates to try; `is_cpu` makes everything small enough for a dry run."""

    def __init__(self, content: Entry, trials: Sequence[Entry], *, is_cpu: bool) -> None:
        self.content, self.trials, self.is_cpu = content, list(trials), is_cpu
        for part in [part for entry in self.trials for part in (*entry["inside"], *entry["outside"]) if is_cpu]:
            part |= {"prompt_tokens": min(1500, part["prompt_tokens"]), "n": min(3, part["n"] or 1)}

    def runs(self, stage: str) -> list[Run]:
        """The runs of a stage, in the order of their value."""
        if stage == "trial":
            return [
                Run(f"trial-{entry['name']}", "trial", str(entry["model"]), "alone", "", "plain", 1, trial=number)
                for number, entry in enumerate(self.trials)
            ]
        prefix = "invariant-" if stage == "invariant" else ""
        rows = [line.split() for line in self.content["stages"][stage]]
        return [Run(prefix + "-".join(row), row[0], row[1], row[2], row[3], row[4], int(row[5]), prefix=prefix) for row in rows]

    def killer(self, run: Run) -> Killer:
        """The killer for this run's runner and shape."""
        spec = dict(self.content["killers"][run.killer])
        spec |= spec.get(run.runner, {})
        load = json.loads(json.dumps(self.content["loads"][spec["load"]]))
        scale = 0.4 if self.is_cpu else float(self.content["shapes"][run.shape].get("out_scale", 1.0))
        crowd, killers = load["bystanders"], load["killers"]
        crowd["out"] = [max(8, round(scale * tokens)) for tokens in crowd["out"]]
        if self.is_cpu:
            crowd |= {"n": 6, "prompt": [16, 48]}
            killers |= {"n": 2, "prompt": [600, 700]}
        return Killer(
            load=load, load_name=spec["load"], flags=tuple(spec.get("flags", ())), leave_mib=int(spec.get("leave_mib", 0)),
            fault=spec["fault"], kv_leave_mib=int(spec.get("kv_leave_mib", 0)), survive=str(spec.get("survive", "")),
            adapters=tuple(spec.get("adapters", ())), compacts=bool(spec.get("compacts")),
        )  # fmt: skip

    def model(self, run: Run) -> str:
        """The name of the run's model folder."""
        return run.shape if run.trial >= 0 else str(self.content["shapes"][run.shape]["model"])

    def flags(self, run: Run, model: Path, fresh_mib: int, graphs_mib: int) -> list[str]:
        """The flags of a run's server; `fresh_mib` is free on an empty GPU, `graphs_mib` is what its graphs will take."""
        if self.is_cpu:
            return list(ON_CPU_FLAGS)
        if run.trial >= 0:
            return [str(flag) for flag in self.trials[run.trial]["args"]]
        shape, killer = self.content["shapes"][run.shape], self.killer(run)
        cache_mib = int(shape["kv_mib"])
        if killer.kv_leave_mib:
            cache_mib = fresh_mib - killer.kv_leave_mib - int(shape["weights_mib"]) - graphs_mib
        flags = [*self.content["flags"], *killer.flags, *self.content["modes"][run.mode]]
        flags += ["--kv-cache-memory-bytes", str(cache_mib * MIB)]
        if killer.adapters:
            flags += ["--lora-modules", *(f"{name}={model / 'adapter'}" for name in killer.adapters)]
        return flags

    def table(self, run: Run, flags: Sequence[str], model: Path, fresh_mib: int) -> Entry:
        """The certificate's table for the door, written by hand: the figures are in survive_runs.json."""
        by_hand = dict(self.content["tables"].get(run.killer, self.content["tables"]["logits"]))
        by_hand |= by_hand.get(run.runner, {})
        tokens, sequences = (int(last_value(flags, name)) for name in ("--max-num-batched-tokens", "--max-num-seqs"))
        most = {"prompt_logprobs": {"most_units": tokens}}
        kinds = [kind | most.get(kind["kind"], {}) for kind in by_hand["kinds"]]
        return {
            "schema": "plimsoll.certificate/1", "vllm": "0.32.0" if self.is_cpu else "0.25.1",
            "model": str(model), "gpu": "H200", "made": "2026-11-17T00:00:00Z", "certified": False,
            "spare_bytes": 1 if self.is_cpu else int(by_hand["spare_mib"]) * MIB,
            "assumes": {"free_bytes_at_start": fresh_mib * MIB, "neighbours_bytes": 0, "pieces_bytes": 0,
                        "max_num_batched_tokens": tokens, "max_num_seqs": sequences},
            "kinds": kinds,
        }  # fmt: skip

    # Time and room

    def seconds(self, run: Run) -> float:
        """How long a run takes once its server is ready."""
        guess: Mapping[str, Any] = self.content["seconds"]
        if run.trial >= 0:
            return float(guess["trial"])
        is_short = run.way == "contained" and run.number > 1
        return float(guess["more" if is_short else run.way]) * (float(guess["slow"]) if run.shape == "8b" else 1.0)

    def ready_seconds(self, run: Run) -> float:
        """How long a run's server takes from its gate to being ready."""
        is_eager = run.mode == "eager" or (run.trial >= 0 and "--enforce-eager" in self.trials[run.trial]["args"])
        return float(self.content["seconds"]["ready"]["eager" if is_eager else "graphs"])

    def is_alone(self, run: Run) -> bool:
        """Whether the run's server must have the GPU for itself."""
        return self.is_cpu or run.trial >= 0 or "kv_leave_mib" in self.content["killers"][run.killer]

    def next_wave(self, left: deque[Run], fresh_mib: int) -> list[Run]:
        """Take the next servers that can be on the GPU together."""
        wave: list[Run] = []
        room_mib = fresh_mib - SPARE_MIB
        while left and len(wave) < WAVE:
            run = left[0]
            if wave and (self.is_alone(run) or run.mode != wave[0].mode):
                break
            if not self.is_alone(run):
                room_mib -= int(self.content["shapes"][run.shape]["need_mib"])
            if room_mib < 0 and wave:
                break
            wave.append(left.popleft())
            if self.is_alone(run):
                break
        return wave


def last_value(flags: Sequence[str], name: str) -> str:
    """What a flag is set to; of several the last counts, as it does for vLLM."""
    places = [place for place, flag in enumerate(flags) if flag == name]
    return flags[places[-1] + 1]
