"""The words of `plimsoll inside`."""

from __future__ import annotations

import json

import pytest
import yaml

from plimsoll.launch.installed_vllm import InsideVisibility, InstalledVllm
from plimsoll.render.inside import Checkup, check_json, check_text, wheel_text
from plimsoll.vllm.extension_points import NEEDS, InsidePart, judge, verdicts
from plimsoll.vllm.versions import engine_named
from tests.vllm.vllm_like import files_that_meet_all, sources


def _checkup(files: dict[str, str], *, is_visible: bool | None = True, version: str | None = "0.32.0") -> Checkup:
    answers = judge(sources(files), NEEDS)
    seen = None if is_visible is None else InsideVisibility(is_visible, None, ("plimsoll", "plimsoll_probe"))
    vllm = InstalledVllm("/site/vllm\x1b[2J", version, sources(files), seen)
    return Checkup(vllm, engine_named("0.32.0"), "tested on CPU", answers, verdicts(answers, NEEDS))


@pytest.mark.parametrize(
    ("files", "is_visible", "said", "takes_all"),
    [
        (files_that_meet_all(), True, "takes plimsoll.inside (", True),
        (files_that_meet_all(), None, "takes plimsoll.inside (", True),
        (files_that_meet_all(), False, "does not see it", False),
        ({}, True, "does not take", False),
        ({k: v for k, v in files_that_meet_all().items() if "stats" not in k}, True, "in part", False),
    ],
)
def test_the_first_line_is_the_verdict(files: dict[str, str], is_visible: bool | None, said: str, takes_all: bool) -> None:
    """Who reads one line knows; text and JSON agree; every part is named, and a version that is not known is said as such."""
    checkup = _checkup(files, is_visible=is_visible)
    assert said in str(check_text([checkup])).splitlines()[0]
    assert json.loads(check_json([checkup]))["takes_all"] is takes_all
    assert all(f"\n  {part.value}" in str(check_text([checkup])) for part in InsidePart if takes_all)
    assert "\x1b" not in str(check_text([checkup]))
    assert str(check_text([_checkup(files, version=None)])).startswith("vLLM of unknown version")


def test_the_manifest_snippet_is_yaml_that_mounts_what_it_names() -> None:
    """It parses, and what its variables name lies under its mounts."""
    text = wheel_text("/tmp/w/plimsoll_inside-1-py3-none-any.whl", 1, "0", ["kubernetes"])
    (spec,) = [block for block in text.split("\n\n") if block.lstrip().startswith("# in the pod")]
    pod = yaml.safe_load(spec.replace("[...,", "["))["spec"]
    container = pod["containers"][0]
    for variable, mount, volume in zip(container["env"], container["volumeMounts"], pod["volumes"], strict=True):
        assert variable["value"].startswith(f"{mount['mountPath']}/")
        assert mount["name"] == volume["name"]
