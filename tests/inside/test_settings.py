"""What an operator sets: a value that cannot be read keeps its default and is said once; nothing stops the start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.settings import SETTINGS, InsideSettings
from tests.each import cases

NUMBERS = dict(cases("inside", "settings that are numbers"))
texts = (
    st.text()
    | st.floats().map(str)
    | st.integers().map(str)
    | st.sampled_from(["1e400", "-0", "0x10", "1,5", "٣", " 7 ", "off"])
)


def test_every_setting_is_named_once_and_has_its_default() -> None:
    """Unset, the endpoints are off, nothing is recorded, nothing is shed."""
    found = InsideSettings({})
    for field, default, _, _ in NUMBERS.values():
        assert getattr(found, field) == default
    assert (found.token, found.listen, found.record_folder, found.probe_as_plugin) == ("", "", "", False)
    names = [setting.name for setting in SETTINGS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("PLIMSOLL_") for name in names)
    assert all(setting.says.endswith(".") for setting in SETTINGS)


@given(name=st.sampled_from(sorted(NUMBERS)), text=texts)
def test_any_text_gives_a_value_within_its_bounds(name: str, text: str) -> None:
    """The number that was written, or the default."""
    field, default, low, high = NUMBERS[name]
    found = getattr(InsideSettings({name: text}), field)
    try:
        meant = float(text.strip()) if text.strip() else None
    except ValueError:
        meant = None
    if meant is not None and low <= meant <= high:
        assert found == (int(meant) if type(default) is int else meant)
    else:
        assert found == default


def test_a_bad_value_is_said_once_and_not_repeated_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its name, its bounds and what is taken; never the value, which may be a secret in the wrong place."""
    FAULTS.counts.pop("setting PLIMSOLL_WEDGE_S", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            InsideSettings({"PLIMSOLL_WEDGE_S": "soon-secret"})
    said = [record.getMessage() for record in caplog.records if "PLIMSOLL_WEDGE_S" in record.getMessage()]
    assert len(said) == 1
    assert "120" in said[0]
    assert "secret" not in said[0]
    assert FAULTS.counts["setting PLIMSOLL_WEDGE_S"] == 3


def test_the_token_comes_from_the_environment_or_a_file_that_can_be_read(tmp_path: Path) -> None:
    """The environment first; blanks and line ends are cut off; without a token the endpoints are off, never open by mistake."""
    (tmp_path / "folder").mkdir()
    for name, content in (("good", b"  from-the-file\n"), ("binary", b"\xff\xfe\x80"), ("empty", b"\n")):
        (tmp_path / name).write_bytes(content)
    files = {name: str(tmp_path / name) for name in ("good", "missing", "folder", "binary", "empty")}
    found = {name: InsideSettings({"PLIMSOLL_TOKEN_FILE": path}).token for name, path in files.items()}
    assert found == {**dict.fromkeys(files, ""), "good": "from-the-file"}
    assert InsideSettings({"PLIMSOLL_TOKEN": " a ", "PLIMSOLL_TOKEN_FILE": files["good"]}).token == "a"
