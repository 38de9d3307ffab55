"""What a start command makes of plimsoll.inside."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.launch.command_line import ConfigFile, EntryPoint, Launch
from plimsoll.launch.inside_command import FLAGS, InsideLaunch, Plugins, fit, with_remarks
from plimsoll.vllm.extension_points import InsidePart, PartVerdict
from plimsoll.vllm.versions import engine_named
from tests.each import each, rows
from tests.launch.test_check import CASES

ALL = Plugins(has_stat_logger=True, has_probe=True)
YES = tuple(PartVerdict(part, "yes") for part in InsidePart)


def _fit(
    *words: str,
    variables: Mapping[str, str] | None = None,
    vllm: str = "0.32.0",
    plugins: Plugins = ALL,
    config: ConfigFile | None = None,
) -> InsideLaunch:
    launch = Launch("command line", EntryPoint.SERVE, ("m", *words), tuple((variables or {}).items()))
    return fit(launch, engine_named(vllm), config, plugins)


def _lost(fitted: InsideLaunch) -> dict[str, str]:
    return {v.part.value: v.works for v in with_remarks(YES, fitted.remarks) if v.works != "yes"}


def test_a_plain_command_gets_both_flags_at_its_end() -> None:
    """The gate comes last: the last middleware is the outermost, and counts what the others refuse."""
    fitted = _fit("--port", "1", "--middleware", "theirs.M")
    assert fitted.checked.rewritten == ("vllm", "serve", "m", "--port", "1", "--middleware", "theirs.M", *FLAGS)
    assert fitted.remarks == ()
    assert _fit(*FLAGS).checked.rewritten == ("vllm", "serve", "m", *FLAGS)  # nothing is given twice


def test_another_extension_stays_and_the_probe_comes_as_a_plugin() -> None:
    """vLLM takes one extension; the list of plugins, where there is one, must name ours."""
    fitted = _fit("--worker-extension-cls", "a.B", variables={"VLLM_PLUGINS": "x"})
    assert fitted.checked.rewritten[-4:] == ("--worker-extension-cls", "a.B", "--middleware", "plimsoll.inside.Gate")
    assert dict(fitted.checked.rewritten_environment) == {
        "VLLM_PLUGINS": "x,plimsoll,plimsoll_probe", "PLIMSOLL_PROBE": "plugin",
    }  # fmt: skip
    assert _lost(fitted) == {}
    assert _lost(_fit("--worker-extension-cls", "a.B", plugins=Plugins(has_stat_logger=True, has_probe=False))) == {
        "probe": "no"
    }


SERVER = {"gate": "no", "drain": "no", "shed": "no"}


@each(("words", "variables", "lost", "said"), rows(CASES, "inside"))
def test_flags_and_variables_that_matter(words: str, variables: str, lost: str, said: str) -> None:
    """Each says what it means for which part, and what means nothing is not spoken of."""
    fitted = _fit(*words.split(), variables=dict(pair.split("=") for pair in variables.split()))
    assert _lost(fitted) == dict(pair.split("=") for pair in lost.split())
    assert (said in " ".join(remark.says for remark in fitted.remarks)) if said else fitted.remarks == ()


def test_what_matters_only_elsewhere() -> None:
    """A flag in the file of --config counts; statistics stay off without our plugin; VLLM_USE_V1=0 where a release reads it."""
    fitted = _fit("--config", "c.yaml", config=ConfigFile("c.yaml", {"worker-extension-cls": "a.B"}))
    assert "--worker-extension-cls" not in fitted.checked.rewritten
    assert dict(fitted.checked.rewritten_environment)["PLIMSOLL_PROBE"] == "plugin"
    none = Plugins(has_stat_logger=False, has_probe=True)
    assert _lost(_fit("--disable-log-stats", vllm="0.9.2", plugins=none)) == {"shed": "no", "recorder": "no"}
    assert _lost(_fit(vllm="0.9.2", variables={"VLLM_USE_V1": "0"})) == {**SERVER, "recorder": "no"}
    assert _lost(_fit(variables={"VLLM_USE_V1": "0"})) == {}


def test_a_variable_that_may_hold_flags_is_said() -> None:
    """What $EXTRA holds was not seen, and could be another extension."""
    launch = Launch("start.sh:1", EntryPoint.SERVE, ("m", "$EXTRA"), unresolved=("EXTRA",))
    remarks = fit(launch, engine_named("0.32.0"), None, ALL).remarks
    assert [remark.name for remark in remarks] == ["$EXTRA"]


def test_a_verdict_is_only_ever_lowered() -> None:
    """A command cannot make good what the release lacks."""
    verdicts = (PartVerdict(InsidePart.PROBE, "no", ("lost",)),)
    (lowered,) = with_remarks(verdicts, _fit("--nnodes", "2").remarks)
    assert lowered.works == "no"
    assert lowered.because[0] == "lost"
    assert len(lowered.because) == 2
