"""usage: plimsoll guard --engine URL [--engine URL...] [options]
       plimsoll guard --config plimsoll.toml [options]

Watches vLLM servers and judges them: dead, stuck, saturated, thrashing, growing, about to run out. It says one sentence for
each change and is quiet otherwise. It only reads: nothing about a server is changed, and no flag of it need be.

  --engine URL          a server to watch, http://HOST:PORT; may be repeated
  --config FILE         engines, discovery (file_sd, http_sd, Kubernetes), policy, notifications, API: see docs/guard.md
  --every TIME          how often each is looked at; default: 5s
  --canary              also send each engine of --engine a request of one token every 30 s: only that proves that one is stuck
  --looks N             look at each so many times, then stop; exit code 1 if something holds then
  --json                each change as a line of JSON
  --listen HOST:PORT    where its API listens; default: 127.0.0.1:9790; another address needs a token
  --token-file FILE     the API's token; default: $PLIMSOLL_GUARD_TOKEN, else one is drawn and left for `plimsoll guardctl`
  --no-api              no API

$PLIMSOLL_TOKEN is the token of the gates of --engine, where they have one (docs/inside.md).
Exit codes: 0 it was stopped, or nothing holds after --looks; 1 something holds then; 2 an option or the configuration is
wrong; 3 no engine ever answered, or the API's place is taken.
Read on: docs/guard.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.cli.output import show
from plimsoll.errors import BadInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.guard.policy import Policy
    from plimsoll.sources.guard_config import GuardConfig

LATER = "comes with a later release: this one watches and judges, and touches nothing"


class Asked(NamedTuple):
    """What the command line and the configuration say together."""

    config: GuardConfig
    policy: Policy
    looks: int | None
    has_api: bool
    is_json: bool


def run(words: list[str]) -> int:
    """Read, then watch until somebody stops it."""
    if {"--help", "-h"} & set(words):
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    asked = read_asked(words, os.environ)
    from plimsoll.cli.guard_run import watch

    return watch(asked)


def read_asked(words: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """Everything that was asked for; BadInput for whatever cannot be."""
    from plimsoll.cli.options import split_options

    urls, rest = _engines(words)
    options = split_options(
        rest, with_value=("--config", "--every", "--looks", "--listen", "--token-file"),
        switches=("--json", "--no-api", "--canary", "--act"),
    )  # fmt: skip
    if "--act" in options.switches:
        raise BadInput(f"--act {LATER}")
    if options.verbatim is not None:
        raise BadInput(f"starting a server behind -- {LATER}")
    if options.rest:
        raise BadInput(f"{options.rest[0][:200]!r} is no option of guard; give engines with --engine URL")
    from plimsoll.sources.guard_config import GuardConfig, read_guard_config

    path = options.values.get("--config")
    config = GuardConfig() if path is None else read_guard_config(path)
    config = _with_engines(config, urls, environ, has_canary="--canary" in options.switches)
    discover = config.discover
    if not config.engines and not (discover.file_sd or discover.http_sd or discover.kubernetes):
        raise BadInput("nothing to watch: give --engine http://HOST:PORT, or --config FILE with engines in it")
    if "--canary" in options.switches and not urls:
        raise BadInput('--canary is for engines of --engine; in a configuration write canary = "30s"')
    config = _with_api(config, options.values, environ)
    looks = _looks(options.values.get("--looks"))
    policy = _policy(config, options.values.get("--every"))
    return Asked(config, policy, looks, "--no-api" not in options.switches, "--json" in options.switches)


def _engines(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The addresses of --engine, and all other words."""
    urls: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        name, equals, value = words[position].partition("=")
        position += 1
        if name != "--engine":
            rest.append(words[position - 1])
            continue
        if not equals:
            if position >= len(words):
                raise BadInput("--engine needs a value")
            value = words[position]
            position += 1
        urls.append(value)
    return urls, rest


def _with_engines(config: GuardConfig, urls: Sequence[str], environ: Mapping[str, str], *, has_canary: bool) -> GuardConfig:
    from plimsoll.sources.discovery import Target, named
    from plimsoll.sources.http_get import address

    engines = {target.name: target for target in config.engines}
    for url in urls:
        try:
            address(url)
        except BadInput as error:
            raise BadInput(f"--engine: {error}") from None
        token = environ.get("PLIMSOLL_TOKEN") or None
        engines.setdefault(named(url), Target(named(url), url.strip(), token, 30.0 if has_canary else None))
    return config._replace(engines=tuple(engines.values()))


def _with_api(config: GuardConfig, values: Mapping[str, str], environ: Mapping[str, str]) -> GuardConfig:
    from plimsoll.sources.guard_config import SHORTEST_TOKEN, is_loopback, is_open_to_all, listen_of, open_to_all, read_token

    api = config.api
    if "--token-file" in values:
        path = values["--token-file"]
        api = api._replace(token=read_token(path))
        if is_open_to_all(path):
            config = config._replace(warnings=tuple(dict.fromkeys((*config.warnings, open_to_all(path)))))
    elif api.token is None and environ.get("PLIMSOLL_GUARD_TOKEN"):
        api = api._replace(token=environ["PLIMSOLL_GUARD_TOKEN"])
        if not re.fullmatch(rf"[\x21-\x7e]{{{SHORTEST_TOKEN},4096}}", environ["PLIMSOLL_GUARD_TOKEN"]):
            raise BadInput(f"PLIMSOLL_GUARD_TOKEN holds no token: one word of {SHORTEST_TOKEN} letters at least")
    if "--listen" in values:
        found = listen_of(values["--listen"])
        if found is None:
            raise BadInput(f"--listen {values['--listen'][:100]!r} is not HOST:PORT")
        api = api._replace(host=found[0], port=found[1], is_asked=True)
        if not is_loopback(api.host) and api.token is None:
            raise BadInput(f"--listen {api.host} is not this machine alone: that needs --token-file or $PLIMSOLL_GUARD_TOKEN")
    return config._replace(api=api)


def _policy(config: GuardConfig, every: str | None) -> Policy:
    from plimsoll.guard.policy import Misread, read_policy
    from plimsoll.sources.guard_config import seconds_in

    try:
        policy = read_policy(config.policy)
    except Misread as error:
        table, key = error.place
        path = [int(part) if part.isdecimal() else part for part in (*table.split("."), key) if part]
        raise config.refuse(error.message, "policy", *path) from None
    if every is None:
        return policy
    try:
        every_s = seconds_in(every)
    except BadInput as error:
        raise BadInput(f"--every: {error}") from None
    if not 1.0 <= every_s <= 300.0:
        raise BadInput(f"--every must lie between 1 and 300 s, not {every_s:g}")
    return policy._replace(every_s=every_s)


def _looks(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise BadInput(f"--looks {text[:40]!r} is not a whole number above 0")
    return int(text)
