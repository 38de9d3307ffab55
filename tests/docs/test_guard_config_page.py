"""docs/guard-config.md: its table is what guard reads by, and its example is a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import write_guard_page
from plimsoll.cli.guardctl import VERBS
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.locks import EtcdLockConfig
from plimsoll.guard.config import KEYS
from tests.options import guard_options

Capsys = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_are_what_guard_reads_by(capsys: Capsys) -> None:
    """`python -m lab.write_guard_page --check` has nothing to say; every key has its row and its sentence."""
    assert write_guard_page.main(["--check"]) == 0, capsys.readouterr().out
    table = write_guard_page.keys()
    for key in KEYS:
        assert f"| `{key.name}` | {write_guard_page.TAKES[key.kind]} |" in table
        assert key.text
        assert "|" not in key.text
    assert len({(key.table, key.name) for key in KEYS}) == len(KEYS) == table.count("\n") - 1


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    """What the page shows can be used as it is, once its files are there."""
    page = (DOCS / "guard-config.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0].replace("/etc/plimsoll/", "")
    for name in ("gate.token", "etcd.password"):
        (tmp_path / name).write_text("a-token-that-is-long-enough", encoding="utf-8")
    path = tmp_path / "plimsoll.toml"
    path.write_text(text, encoding="utf-8")
    asked = guard_options(["--config", str(path), "--act"], {})
    first, second = asked.config.engines
    assert (first.name, second.name) == ("llama-a", "llama-b")
    assert isinstance(first.balancer, HaproxyConfig)
    assert isinstance(second.restart, CommandRestarterConfig)
    assert isinstance(asked.config.lock, EtcdLockConfig)
    assert asked.is_acting


def test_guardctl_has_a_page_for_every_verb() -> None:
    """Each stands there as it is typed."""
    page = (DOCS / "guardctl.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"guardctl {verb}" in page or f"`{verb}`" in page, verb
