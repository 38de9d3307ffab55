"""Options of commands from the words that a user types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.cli import guard
from plimsoll.cli.main import parse
from plimsoll.guard.daemon.run import GuardOptions
from plimsoll.simulate.options import StandinCommandOptions
from plimsoll.standin import launch as standin
from plimsoll.standin.launch import StandinOptions


def guard_options(words: Sequence[str], environ: Mapping[str, str]) -> GuardOptions:
    return guard.read_options(parse(guard.GuardCommandOptions, words), environ)


def standin_options(words: Sequence[str], environ: Mapping[str, str]) -> StandinOptions:
    """What `plimsoll standin` would do with these words."""
    return standin.read_options(parse(StandinCommandOptions, words), environ)
