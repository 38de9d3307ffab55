"""usage: plimsoll inside check [--python PATH | --vllm-dir DIR] [--json] [WHAT]
       plimsoll inside wheel [OUT_DIR] [--for kubernetes|docker|pip] [--json]

What runs in vLLM's own processes: memory figures, an honest readiness, drain, shedding and a recording of the traffic.

check  says whether a vLLM will take it, what is lost where it does not take all, and the exact flags. vLLM is not imported:
  its sources are read, so it takes about a second and touches no GPU. WHAT is a start command (-- vllm serve MODEL ...), a
  script, a compose file or a manifest: its flags are judged too, and it is printed with plimsoll.inside in it.
wheel  writes plimsoll.inside as a wheel without dependencies, to be mounted into a stock image, and says how. OUT_DIR: here,
  unless another folder is named.

{options}

Exit codes: 0 all of it works, 1 something will not, 2 the input is wrong, 3 there is no vLLM, or nothing can be written.
Read on: docs/inside.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.assets.inside_wheel import ENTRY_POINTS, make_wheel, write_wheel
from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput
from plimsoll.inside.survive.support import proven_lines
from plimsoll.launch import installed_vllm
from plimsoll.launch.command_line import Launch, config_of, launches_named
from plimsoll.launch.inside_command import PLUGIN_NAME, PROBE_PLUGIN_NAME, Plugins, fit, with_remarks
from plimsoll.launch.installed_vllm import InstalledVllm
from plimsoll.launch.options import Words, first_given, meant, option, pid_of, switch
from plimsoll.render import inside as report
from plimsoll.render.terminal import show
from plimsoll.vllm.extension_points import BY_SIGNATURE, NEEDS, TESTED, NeedAnswer, judge, verdicts
from plimsoll.vllm.versions import Engine, engine_named, newest


@dataclass(frozen=True, kw_only=True)
class InsideOptions(Words):
    """The options of `plimsoll inside`."""

    python: str | None = option("PATH", "check: the vLLM of this Python; default: the Python that runs plimsoll")
    vllm_dir: str | None = option("DIR", "check: the vLLM in this folder (site-packages, or an unpacked wheel)")
    pid: int | None = option("N", read=pid_of)
    way: str | None = option("WAY", "wheel: print one way alone", name="--for", choices=report.WAYS)
    json: bool = switch("one JSON object, schema plimsoll.inside/1 (check) or plimsoll.inside-wheel/1 (wheel)")


def run(options: InsideOptions) -> int:
    """Runs `inside check` or `inside wheel`."""
    verb, options = "".join(options.rest[:1]), replace(options, rest=options.rest[1:])
    if verb not in ("check", "wheel"):
        raise BadInput("say `plimsoll inside check` or `plimsoll inside wheel` (plimsoll inside --help)")
    other = first_given(options, *(("way",) if verb == "check" else ("python", "vllm_dir", "pid")))
    if other is not None:
        raise BadInput(f"{other} does not go with inside {verb}")
    return _check(options) if verb == "check" else _wheel(options)


def _check(options: InsideOptions) -> int:
    if options.rest and options.rest[0].startswith("-") and options.rest[0] != "-":
        word = options.rest[0]
        raise BadInput(f"there is no option {word}{meant(word, options)}; put -- in front of a vLLM command")
    is_given = bool(options.rest or options.verbatim or options.pid is not None)
    launches = launches_named(options, "inside check") if is_given else []
    vllm = _vllm(options, [launch for launch, _ in launches])
    engine = _engine(vllm)
    answers = judge(vllm.sources, NEEDS)
    plugins = _plugins(vllm, answers)
    fitted = [fit(launch, engine, config_of(launch, folder), plugins) for launch, folder in launches]
    remarks = [remark for inner in fitted for remark in inner.remarks]
    checkup = report.Checkup(
        vllm.folder,
        vllm.version,
        engine,
        TESTED.get(engine.release, BY_SIGNATURE) if engine.is_exact else "by signature, read from its sources",
        vllm.seen.is_visible if vllm.seen is not None else None,
        vllm.seen.entry_points if vllm.seen is not None else (),
        answers,
        with_remarks(verdicts(answers, NEEDS), remarks),
        tuple(fitted),
        NEEDS,
        tuple(proven_lines(vllm.version or "of unknown version")),
    )
    show(report.check_json(checkup) if options.json else report.check_text(checkup))
    return 0 if checkup.takes_all else 1


def _plugins(vllm: InstalledVllm, answers: Sequence[NeedAnswer]) -> Plugins:
    """Which of our entry points count; where no Python was asked they are taken to be there."""
    names = vllm.seen.entry_points if vllm.seen is not None and vllm.seen.is_visible else (PLUGIN_NAME, PROBE_PLUGIN_NAME)
    by_entry_point = any(answer.name == "stat loggers" and "entry point" in answer.note for answer in answers)
    return Plugins(by_entry_point and PLUGIN_NAME in names, PROBE_PLUGIN_NAME in names)


def _vllm(options: InsideOptions, launches: list[Launch]) -> InstalledVllm:
    python, folder = options.python, options.vllm_dir
    if python is not None and folder is not None:
        raise BadInput("--python and --vllm-dir name two places; give one")
    if folder is not None:
        return installed_vllm.vllm_in(folder)
    if python is None:
        return installed_vllm.vllm_of_this_python()
    # What the command puts on PYTHONPATH is what vLLM will see.
    return installed_vllm.vllm_of(python, dict(launches[0].environment) if launches else {})


def _engine(vllm: InstalledVllm) -> Engine:
    """The release whose flags apply; a version that says nothing is met by the newest."""
    if vllm.version is not None:
        try:
            return engine_named(vllm.version)
        except BadInput:
            pass
    note = f"its version is not known; its sources were read, and the flags are those of {newest()}"
    return Engine(vllm.version or "unknown", newest(), is_exact=False, note=note)


def _wheel(options: InsideOptions) -> int:
    words = [*options.rest, *(options.verbatim or ())]
    if len(words) > 1 or any(word.startswith("-") for word in options.rest):
        raise BadInput(f"plimsoll inside wheel takes one folder; {words[-1]!r} is too much")
    if words and (not words[0] or "\0" in words[0]):
        raise BadInput("the folder's name is empty or holds a zero byte")
    wheel = make_wheel()
    path = str(write_wheel(wheel, words[0] if words else "."))
    digest = hashlib.sha256(wheel.content).hexdigest()
    if options.json:
        show(report.wheel_json(path, len(wheel.content), digest, wheel.members, ENTRY_POINTS))
    else:
        show(report.wheel_text(path, len(wheel.content), digest, (options.way,) if options.way is not None else report.WAYS))
    return 0


COMMAND = OptionsCommand("inside", InsideOptions, run, __doc__, is_open=True, offers=("check", "wheel"))
