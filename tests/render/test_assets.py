"""What `plimsoll assets` says it did."""

from __future__ import annotations

import json

from plimsoll.assets.files import Changes
from plimsoll.render.assets import AssetsReport, as_json, as_text

CHANGES = Changes(write=("a",), same=("b", "c"), kept=("d",), outdated=("e",), remove=("f",), left=("g",))


def test_every_path_is_named_with_what_became_of_it_and_how_it_is_used() -> None:
    """Each under its own words, what is unchanged is counted; for what was written the place of the next commands."""
    told = str(as_text(AssetsReport("out", "0.32.0", "m", CHANGES, ("mind this",)))).splitlines()
    assert told[:2] == ["wrote 1 file to out for vLLM 0.32.0 and m, 2 unchanged", "  a"]
    assert [told[told.index(f"  {name}") - 1].split(",")[0].rstrip(":") for name in "defg"] == [
        "edited by hand and kept", "edited by hand", "removed", "no longer generated",
    ]  # fmt: skip
    assert told[-1] == "  note: mind this"
    changes = Changes(write=("compose/compose.yaml", "monitoring/rules.yml"), same=("systemd/vllm.service",))
    told = str(as_text(AssetsReport("out", "0.32.0", "m", changes))).splitlines()
    assert told[-3:-1] == ["Next steps:", "  compose     the top of compose/compose.yaml, docs/launch.md#compose"]
    assert told[-1].split() == ["monitoring", "docs/monitoring.md"]
    assert "Next steps" not in str(as_text(AssetsReport("out", "0.32.0", "m", changes, is_check=True)))
    assert "Next steps" not in str(as_text(AssetsReport("out", "0.32.0", "m", Changes(same=("compose/compose.yaml",)))))


def test_a_check_shows_the_difference_first() -> None:
    """Then how many files differ; edits are fine unless they are out of date, for a check nothing but sameness is."""
    told = str(as_text(AssetsReport("out", "0.32.0", None, CHANGES, is_check=True, differences=("-x", "+y"))))
    assert told.startswith("-x\n+y\nout differs from what would be generated for vLLM 0.32.0: 5 files")
    assert str(as_text(AssetsReport("out", "0.32.0", None, Changes(same=("a",)), is_check=True))).endswith(
        "for vLLM 0.32.0: 1 file"
    )
    assert AssetsReport("o", "v", None, Changes(write=("a",), kept=("b",), left=("c",))).is_fine
    assert not AssetsReport("o", "v", None, Changes(outdated=("a",))).is_fine
    assert not AssetsReport("o", "v", None, Changes(kept=("a",)), is_check=True).is_fine
    body = json.loads(as_json(AssetsReport("o", "v", None, CHANGES, is_check=True, differences=("-x",))))
    assert (body["schema"], body["fine"], body["diff"], body["would_write"]) == ("plimsoll.assets/1", False, "-x", ["a"])
