"""usage: plimsoll inside check [--python PATH | --vllm-dir DIR | --vllm VERSION] [--require PART,...] [--json] [WHAT]
       plimsoll inside wheel [OUT_DIR | FILE.whl] [--for kubernetes|docker|pip] [--json]

What runs in vLLM's own processes: memory figures, an honest readiness, drain, shedding and a recording of the traffic.

check  says whether a vLLM will take it, what is lost where it does not take all, and the exact flags. vLLM is not imported:
  its sources are read, so it takes about a second and touches no GPU. WHAT is a start command (-- vllm serve MODEL ...), a
  script, a compose file or a manifest: its flags are judged too, and it is printed with plimsoll.inside in it. A manifest's
  image is judged by its tag: no vLLM has to be at hand. --require is for CI: exit 1 unless those parts work and are asked for.
wheel  writes plimsoll.inside as a wheel without dependencies, to be mounted into a stock image, and says how. OUT_DIR: here,
  unless another folder is named.

{options}

Exit codes: 0 all of it works, 1 something will not, 2 the input is wrong, 3 there is no vLLM, or nothing can be written.
Read on: docs/inside.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plimsoll.assets.inside_wheel import make_wheel, write_wheel
from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput
from plimsoll.inside.survive.support import proven_lines
from plimsoll.launch import installed_vllm
from plimsoll.launch.command_line import EntryPoint, Launch, config_of, engine_meant, launches_named, version_in_image
from plimsoll.launch.inside_command import GATE, PLUGIN_NAME, PROBE, PROBE_PLUGIN_NAME, InsideLaunch, Plugins, fit, with_remarks
from plimsoll.launch.installed_vllm import InstalledVllm
from plimsoll.launch.options import Words, first_given, meant, option, pid_of, switch
from plimsoll.render import inside as report
from plimsoll.render.terminal import show
from plimsoll.vllm import extension_points
from plimsoll.vllm.extension_points import NEEDS, InsidePart, PartVerdict, Sources
from plimsoll.vllm.versions import Engine, engine_named, newest


@dataclass(frozen=True, kw_only=True)
class InsideOptions(Words):
    python: str | None = option("PATH", "check: the vLLM of this Python; default: the Python that runs plimsoll")
    vllm_dir: str | None = option("DIR", "check: the vLLM in this folder (site-packages, or an unpacked wheel)")
    vllm: str | None = option("VERSION", "check: a release, where none is at hand; default: the tag of the manifest's image")
    require: tuple[str, ...] = option(
        "PART,...",
        f"check: exit 1 unless these work: {', '.join(InsidePart)}",
        default=(),
        may_repeat=True,
        offers=lambda: tuple(InsidePart),
    )
    pid: int | None = option("N", read=pid_of)
    way: str | None = option("WAY", "wheel: print one way alone", name="--for", choices=report.WAYS)
    json: bool = switch("one JSON object, schema plimsoll.inside/1 (check) or plimsoll.inside-wheel/1 (wheel)")


def run(options: InsideOptions) -> int:
    """Runs `inside check` or `inside wheel`."""
    verb, options = "".join(options.rest[:1]), replace(options, rest=options.rest[1:])
    if verb not in ("check", "wheel"):
        raise BadInput("say `plimsoll inside check` or `plimsoll inside wheel` (plimsoll inside --help)")
    other = first_given(options, *(("way",) if verb == "check" else ("python", "vllm_dir", "pid", "vllm")))
    other = other or ("--require" if verb == "wheel" and options.require else None)
    if other is not None:
        raise BadInput(f"{other} does not go with inside {verb}")
    return _check(options) if verb == "check" else _wheel(options)


def _check(options: InsideOptions) -> int:
    if options.rest and options.rest[0].startswith("-") and options.rest[0] != "-":
        word = options.rest[0]
        raise BadInput(f"there is no option {word}{meant(word, options)}; put -- in front of a vLLM command")
    is_given = bool(options.rest or options.verbatim or options.pid is not None)
    launches = launches_named(options, "inside check") if is_given else []
    required = tuple(part for text in options.require for part in text.split(","))
    if unknown := next((part for part in required if part not in tuple(InsidePart)), None):
        raise BadInput(f"--require {unknown[:40]!r}: it is one of {', '.join(InsidePart)}")
    # One report for each release that the file deploys.
    groups: dict[str, list[tuple[Launch, str]]] = {}
    for launch, folder in launches:
        groups.setdefault(_release(options, launch), []).append((launch, folder))
    checkups = [_checkup(options, group, [InsidePart(part) for part in required]) for group in groups.values() or [[]]]
    show(report.check_json(checkups) if options.json else report.check_text(checkups))
    if required:
        return 1 if any(checkup.missing for checkup in checkups) else 0
    return 0 if all(checkup.takes_all for checkup in checkups) else 1


def _release(options: InsideOptions, launch: Launch | None) -> str:
    """The release that is judged by the table of releases; empty where a vLLM is read instead."""
    if options.python is not None or options.vllm_dir is not None:
        if options.vllm is not None:
            raise BadInput("--vllm names a release and --python or --vllm-dir a place; give one")
        return ""
    is_elsewhere = launch is not None and (launch.image is not None or launch.entry is EntryPoint.IMAGE)
    if options.vllm is not None or is_elsewhere:
        return engine_meant(launch, options.vllm).release if launch is not None else engine_named(options.vllm).release
    return ""


def _checkup(options: InsideOptions, launches: list[tuple[Launch, str]], required: Sequence[InsidePart]) -> report.Checkup:
    first = launches[0][0] if launches else None
    if release := _release(options, first):
        engine = engine_meant(first, options.vllm) if first is not None else engine_named(options.vllm)
        said = f"by {engine.because or '--vllm'}; no vLLM was read"
        is_named = first is not None and (first.vllm or (first.image and version_in_image(first.image)))
        version = release if options.vllm or is_named else None
        if version is None:
            note = f"its image names no release: judged as {release}; --vllm says otherwise"
            engine = Engine("unknown", release, is_exact=False, note=note)
        vllm = InstalledVllm(said, version, Sources(lambda _: None, lambda _: ()), None)
        answers = extension_points.answers_in(release)
        evidence = extension_points.TESTED.get(release, extension_points.BY_SIGNATURE)
    else:
        vllm = _vllm(options, [launch for launch, _ in launches])
        engine = _engine(vllm)
        answers = extension_points.judge(vllm.sources, NEEDS)
        evidence = (
            extension_points.TESTED.get(engine.release, extension_points.BY_SIGNATURE)
            if engine.is_exact
            else "by signature, read from its sources"
        )
    # Which of our entry points count; where no Python was asked they are taken to be there.
    names = vllm.seen.entry_points if vllm.seen is not None and vllm.seen.is_visible else (PLUGIN_NAME, PROBE_PLUGIN_NAME)
    by_entry_point = any(answer.name == "stat loggers" and "entry point" in answer.note for answer in answers)
    plugins = Plugins(by_entry_point and PLUGIN_NAME in names, PROBE_PLUGIN_NAME in names)
    fitted = tuple(fit(launch, engine, config_of(launch, folder), plugins) for launch, folder in launches)
    judged = with_remarks(extension_points.verdicts(answers, NEEDS), [remark for inner in fitted for remark in inner.remarks])
    survive = tuple(proven_lines(vllm.version or "of unknown version"))
    missing = tuple(why for part in required for why in _missing(part, judged, fitted))
    return report.Checkup(vllm, engine, evidence, answers, judged, fitted, survive, missing)


def _missing(part: InsidePart, judged: Sequence[PartVerdict], fitted: Sequence[InsideLaunch]) -> Iterator[str]:
    """Why a part that is required would not be there: the release has no place for it, or a command does not ask for it."""
    for verdict in judged:
        if verdict.part is part and verdict.works != "yes":
            yield f"{part}: {verdict.works}: {'; '.join(verdict.because) or 'not as it should be'}"
    flag = PROBE if part is InsidePart.PROBE else GATE
    for inner in fitted:
        source = inner.checked.launch.source
        if not inner.checked.starts:
            yield f"{part}: {source}: this vLLM refuses the command"
        elif flag in inner.added or (
            part is InsidePart.PROBE
            and ("PLIMSOLL_PROBE", "plugin") in set(inner.changed) - set(inner.checked.launch.environment)
        ):
            yield f"{part}: {source}: the command does not ask for it ({flag})"


def _vllm(options: InsideOptions, launches: list[Launch]) -> InstalledVllm:
    python, folder = options.python, options.vllm_dir
    if python is not None and folder is not None:
        raise BadInput("--python and --vllm-dir name two places; give one")
    if folder is not None:
        return installed_vllm.vllm_in(folder)
    # What the command puts on PYTHONPATH is what vLLM will see.
    return installed_vllm.vllm_of(python, dict(launches[0].environment) if launches and python is not None else {})


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
        show(report.wheel_json(path, len(wheel.content), digest, wheel.members))
    else:
        show(report.wheel_text(path, len(wheel.content), digest, (options.way,) if options.way is not None else report.WAYS))
    return 0


COMMAND = OptionsCommand("inside", InsideOptions, run, __doc__, is_open=True, offers=("check", "wheel"))
