"""usage: plimsoll guard --engine URL [--engine URL...] [options]
       plimsoll guard --config plimsoll.toml [options]
       plimsoll guard [options] -- vllm serve MODEL ...

Watches vLLM servers and judges them: dead, stuck, saturated, thrashing, growing, about to run out. It prints one sentence for
each change and is quiet otherwise. It only reads, unless it is told to act: then it escalates from harmless to harmful actions
(shed, compact, drain and restart), one engine at a time, within budgets. Guard starts a server behind --, which outlives it.

{options}

$PLIMSOLL_TOKEN is the token of the gates of --engine, where they have one (docs/inside.md).
Exit codes: 0 it was stopped, or no condition is true after --looks; 1 a condition is true then; 2 an option or the
configuration is wrong; 3 no engine ever answered, or the address of --listen is in use.
Read on: docs/guard.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import KUBECONFIG, kubeconfig_access
from plimsoll.guard.config import GuardConfig, is_loopback, listen_of, read_guard_config
from plimsoll.guard.config_fields import SHORTEST_TOKEN
from plimsoll.guard.config_reader import USUAL_CANARY_S, open_secret, read_token
from plimsoll.guard.daemon.run import GuardOptions, OwnEngine, own_engine, watch
from plimsoll.guard.engine_config import EngineConfig, host_and_port
from plimsoll.guard.judge.policy import Policy, PolicyError, amount, read_policy
from plimsoll.launch.options import Words, count, option, switch
from plimsoll.net.address import address
from plimsoll.net.client import TRUST, FileToken


@dataclass(frozen=True, kw_only=True)
class GuardCommandOptions(Words):
    engine: tuple[str, ...] = option("URL", "a server to watch, http://HOST:PORT; may be repeated", may_repeat=True, default=())
    config: str | None = option("FILE", "engines, discovery, policy, notifications, API: see docs/guard.md")
    act: bool = switch("also do what it would advise, as [act] of the configuration allows; default: it only advises")
    every: str | None = option("TIME", "how often each is looked at; default: 5s")
    canary: bool = switch("also send each engine of --engine a canary request every 30 s: only that proves that one is stuck")
    looks: int | None = option(
        "N", "look at each so many times, then stop; exit code 1 if a condition is true then", read=count
    )
    json: bool = switch("each change as a line of JSON")
    listen: str | None = option("HOST:PORT", "where its API listens; default: 127.0.0.1:9790; another address needs a token")
    token_file: str | None = option("FILE", "the API's token; default: $PLIMSOLL_GUARD_TOKEN, else one is drawn for guardctl")
    no_api: bool = switch("no API")
    kubeconfig: str | None = option("FILE", "outside a cluster: how to reach one; default with --context: kubectl's own")
    context: str | None = option("NAME", "the context of that file; default: its current one")


def run(options: GuardCommandOptions) -> int:
    if options.kubeconfig is not None or options.context is not None:
        KUBECONFIG.set(kubeconfig_access(options.kubeconfig, options.context))
    return watch(read_options(options, os.environ))


def read_options(options: GuardCommandOptions, environ: Mapping[str, str]) -> GuardOptions:
    """The options of the command line and the configuration together; BadInput for whatever is wrong."""
    if options.rest:
        raise BadInput(f"guard takes no {options.rest[0][:200]!r}; give engines with --engine URL, a command behind --")
    urls = list(options.engine)
    config = GuardConfig() if options.config is None else read_guard_config(options.config)
    if config.tls is not None:
        TRUST.set(config.tls.trust)
    own = None if options.verbatim is None else own_engine(options.verbatim, urls[0] if len(urls) == 1 else None)
    urls = urls if own is None else list(dict.fromkeys([*urls, own.url]))
    engines = {engine.name: engine for engine in config.engines}
    places = {host_and_port(engine.url) for engine in config.engines}
    for url in urls:
        try:
            address(url)
        except BadInput as error:
            raise BadInput(f"--engine: {error}") from None
        name = host_and_port(url)
        if name not in places:  # else the configuration has said more of it
            canary_s = USUAL_CANARY_S if options.canary else None
            engines.setdefault(name, EngineConfig(name, url.strip(), environ.get("PLIMSOLL_TOKEN") or None, canary_s))
    config = replace(config, engines=tuple(engines.values()))
    config = config if own is None else _with_own(config, own)
    name = "" if own is None else config.engines[0].name
    discover = config.discover
    if not config.engines and not (discover.file_sd or discover.http_sd or discover.kubernetes):
        raise BadInput("nothing to watch: give --engine http://HOST:PORT, or --config FILE with engines in it")
    if options.canary and not urls:
        raise BadInput('--canary is for engines of --engine; in a configuration write canary = "30s"')
    config = _with_api(config, options, environ)
    policy = _policy(config, options.every)
    # With nothing in hand it could never do anything: better said now than in the night.
    pods = config.discover.kubernetes
    has_gate = config.discover.token is not None or any(engine.token is not None for engine in config.engines)
    has_gate = has_gate or (pods is not None and pods.act)
    if options.act and not has_gate and own is None and all(engine.restart is None for engine in config.engines):
        raise BadInput("--act: nothing can be done: no engine has a restart, and none has a token_file for its gate")
    return GuardOptions(
        config, policy, options.looks, not options.no_api, options.json, options.act, options.verbatim or (), name
    )


def _with_own(config: GuardConfig, own: OwnEngine) -> GuardConfig:
    """The engine that guard starts itself comes first; the configuration may have said more of it, and given it a name."""
    place = [host_and_port(engine.url) for engine in config.engines].index(host_and_port(own.url))
    engine = config.engines[place]
    if engine.restart is not None:
        raise config.refuse(f"{engine.name} is started by guard itself (--): leave its restart out", "engine", place, "restart")
    engine = replace(engine, kv_connector=engine.kv_connector or own.has_connector, nodes=max(engine.nodes, own.nodes))
    others = (other for other in config.engines if other.name != engine.name)
    return replace(config, engines=(engine, *others))


def _with_api(config: GuardConfig, options: GuardCommandOptions, environ: Mapping[str, str]) -> GuardConfig:
    api = config.api
    if options.token_file is not None:
        api = replace(api, token=FileToken(options.token_file, read_token))
        if warning := open_secret(options.token_file):
            config = replace(config, warnings=tuple(dict.fromkeys((*config.warnings, warning))))
    elif api.token is None and environ.get("PLIMSOLL_GUARD_TOKEN"):
        api = replace(api, token=environ["PLIMSOLL_GUARD_TOKEN"])
        if not re.fullmatch(rf"[\x21-\x7e]{{{SHORTEST_TOKEN},4096}}", environ["PLIMSOLL_GUARD_TOKEN"]):
            raise BadInput(f"PLIMSOLL_GUARD_TOKEN holds no token (one word of {SHORTEST_TOKEN} letters at least)")
    if api.read_token is not None and api.read_token == api.token:
        raise BadInput("[api] read_token_file: the token that only reads must be another one than the API's own")
    if options.listen is not None:
        try:
            api = replace(api, listen=listen_of(options.listen))
        except BadInput:
            raise BadInput(f"--listen {options.listen[:100]!r} is not HOST:PORT") from None
        if not is_loopback(api.host) and api.token is None:
            raise BadInput(f"--listen {api.host} is not this machine alone: that needs --token-file or $PLIMSOLL_GUARD_TOKEN")
    return replace(config, api=api)


def _policy(config: GuardConfig, every: str | None) -> Policy:
    try:
        policy = read_policy(config.policy)
    except PolicyError as error:
        raise config.refuse(str(error), "policy", *error.place) from None
    return policy if every is None else policy._replace(every_s=amount("--every", every, "s", 1.0, 300.0))


COMMAND = OptionsCommand("guard", GuardCommandOptions, run, __doc__)
