"""An operator's settings: environment variables that start with PLIMSOLL_, read once in each process.

vLLM passes its environment to every process it starts, so one place sets all of them. A value that cannot be read is
replaced by its default and named in the log: a typing mistake must not keep a server from starting.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.inside.faults import FAULTS


class Setting(NamedTuple):
    """One row of data/settings.json: a setting's name, its default, and one sentence for the docs."""

    name: str
    default: str
    says: str


def data_table(name: str) -> Any:
    """Returns a table of this package's `data` folder, also when the package is imported from an unopened wheel."""
    return json.loads(pkgutil.get_data("plimsoll.inside", f"data/{name}.json") or b"")


SETTINGS = tuple(Setting(**row) for row in data_table("settings"))
_DEFAULTS = {setting.name: setting.default for setting in SETTINGS}


class InsideSettings:
    """The settings of this process, each with its type."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self.token = self.text("PLIMSOLL_TOKEN")
        self.token_file = "" if self.token else self.text("PLIMSOLL_TOKEN_FILE")
        if self.token_file:
            self.token = self.read_token()
        self.listen = self.text("PLIMSOLL_LISTEN")
        self.folder = self.text("PLIMSOLL_DIR")
        self.probe_as_plugin = self.text("PLIMSOLL_PROBE") == "plugin"
        self.sample_s = self.number("PLIMSOLL_SAMPLE_S", low=0.05, high=3600)
        self.snapshot_folder = self.text("PLIMSOLL_SNAPSHOT_DIR")
        self.history_entries = int(self.number("PLIMSOLL_HISTORY", low=0, high=10_000_000))
        self.record_folder = self.text("PLIMSOLL_RECORD")
        self.record_bytes = int(self.number("PLIMSOLL_RECORD_MIB", low=0.01, high=1_000_000) * 2**20)
        self.record_files = int(self.number("PLIMSOLL_RECORD_FILES", low=1, high=100_000))
        self.record_prefixes = self.text("PLIMSOLL_RECORD_PREFIXES") == "1"
        self.record_salt = self.text("PLIMSOLL_RECORD_SALT")
        self.shed_wait_s = self.number("PLIMSOLL_SHED_WAIT_S", low=0.01, high=86_400) or None
        self.failover = self.text("PLIMSOLL_FAILOVER") != "0"
        self.admit = self.choice("PLIMSOLL_ADMIT", ("certified", "shadow"))
        self.certificate = self.text("PLIMSOLL_CERTIFICATE")
        self.wedge_s = self.number("PLIMSOLL_WEDGE_S", low=0.5, high=86_400)
        self.canary_s = self.number("PLIMSOLL_CANARY_S", low=0.5, high=86_400)
        self.survive = self.choice("PLIMSOLL_SURVIVE", ("1", "unproven"))
        self.survive_storm = int(self.number("PLIMSOLL_SURVIVE_STORM", low=0, high=1_000_000))

    def text(self, name: str) -> str:
        return self._environ.get(name, "").strip() or _DEFAULTS[name]

    def number(self, name: str, low: float, high: float) -> float:
        """Returns the value as a number within its bounds, else the default. An empty default is 0."""
        raw = self.text(name)
        if not raw:
            return 0.0
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if low <= value <= high:
            return value
        default = _DEFAULTS[name]
        FAULTS.say(f"setting {name}", f"{name} is not a number from {low:g} to {high:g}; {default or 'off'} is taken")
        return float(default or 0)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Returns the value if it is one of these; empty where it is unset, `0` or none of them."""
        raw = self.text(name)
        if raw in choices:
            return raw
        if raw not in ("", "0"):
            FAULTS.say(f"setting {name}", f"{name} is none of {', '.join(choices)}; it stays off")
        return ""

    def read_token(self) -> str:
        """Returns the token in its file; empty where it cannot be read."""
        try:
            with open(self.token_file, encoding="utf-8") as file:  # noqa: PTH123 - pathlib would take longer than all else here
                return file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            FAULTS.note("reading PLIMSOLL_TOKEN_FILE", error)
            return ""
