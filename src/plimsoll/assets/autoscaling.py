"""Files of `assets --for autoscaling`: a ScaledObject with the rule that a replay chose, its alert, and all rules tried."""

from __future__ import annotations

from plimsoll.assets.names import Names
from plimsoll.assets.rendering import render
from plimsoll.assets.settings import AssetSettings
from plimsoll.tune.autoscale import ADDED_AT_ONCE, IN_FLIGHT, POLL_S, Autoscaling, ScalingTrial

PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
CANNOT_S = 300  # seconds without room to scale, and with more work than the replicas take


def autoscaling_files(settings: AssetSettings, found: Autoscaling, prometheus: str, traffic: str) -> dict[str, str]:
    """Returns the ScaledObject with its alert, and the table of the rules tried."""
    assert found.chosen is not None, "asked only of a rule that keeps the promise"
    rule, names = found.chosen.rule, Names(settings)
    waiting, running = names.vllm("waiting"), names.vllm("running")
    query = f"sum({waiting})" if rule.metric != IN_FLIGHT else f"sum({running}) + sum({waiting})"
    files = {
        "scaledobject.yaml": render(
            "autoscaling.yaml",
            name=settings.name,
            namespace=settings.cluster.namespace,
            workload=settings.cluster.workload,
            rule=rule,
            query=query,
            prometheus=prometheus,
            poll_s=POLL_S,
            added=ADDED_AT_ONCE,
            cannot_s=CANNOT_S,
            about=f"{kept_text(found.chosen)} in a replay of {traffic}; tried.txt has what else was tried.",
        ),
        "tried.txt": tried_text(found, traffic),
    }
    return {f"autoscaling/{name}": text for name, text in files.items()}


def kept_text(trial: ScalingTrial) -> str:
    """Returns `2,998 of 3,000 requests as promised with 1.80 replicas on average`."""
    return f"{trial.met:,} of {trial.requests:,} requests as promised with {trial.mean_replicas:.2f} replicas on average"


def tried_text(found: Autoscaling, traffic: str) -> str:
    """Returns the table of every replayed rule, in order, the chosen one marked."""
    head = ("figure", "target", "from", "to", "up s", "down s", *"traffic,as promised,of all,mean,most,changes,".split(","))
    rows = [head]
    for trial in found.trials:
        rule = trial.rule
        named = (rule.metric, str(rule.target)) if rule.target else ("as many all the time", "-")
        windows = (str(rule.up_s), str(rule.down_s)) if rule.target else ("-", "-")
        mark = "<- chosen" if trial is found.chosen else "" if trial.share >= found.keep else "breaks the promise"
        figures = [f"{trial.met:,}", f"{trial.share:.2%}", f"{trial.mean_replicas:.2f}"]
        figures += [str(trial.peak_replicas), str(trial.changes)]
        rows.append((*named, str(rule.fewest), str(rule.most), *windows, f"{trial.speedup:g}", *figures, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    serves = f"A replica serves {found.start_s} s after it was asked for."
    said = [
        f"Replayed: {traffic}. {serves} The promise is to hold for {found.keep:.0%} of all.",
        "figure: requests of all replicas, looked at every 15 s; target: of one replica;",
        "mean: replicas on average, those that start or end their work included; traffic 1.1: a tenth more of it.",
        "",
        *lines,
    ]
    return "\n".join(said) + "\n"
