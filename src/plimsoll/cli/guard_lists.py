"""Where guard's engines are: those that were named, and what each finder last said of how many there are and how they fare."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from plimsoll.cli.guard_loop import Facts
from plimsoll.errors import BadInput
from plimsoll.report.doctor import clean
from plimsoll.sources.discovery import FileSd, Finder, HttpSd, Pods, Target
from plimsoll.sources.guard_config import Discover, GuardConfig
from plimsoll.sources.http_get import address
from plimsoll.sources.kubernetes_api import Cluster


class Lists:
    """All of them. `note` hears how it is with each finder: what it is called, and its trouble or nothing."""

    def __init__(self, config: GuardConfig, note: Callable[[str, str], None]) -> None:
        self._config, self._note = config, note
        self._found: dict[str, tuple[Target, ...]] = {}
        self._facts: dict[str, dict[str, Facts]] = {}  # by finder, by the name that it gave
        self._own: dict[str, tuple[str, str]] = {}  # by the name here: who found it, and as what
        try:
            self.finders = finders(config.discover)
        except BadInput as error:  # outside a cluster
            raise config.refuse(str(error), "discover", "kubernetes") from None

    async def ask(self, finder: Finder) -> None:
        """Ask one. What goes wrong is said, and what it said before holds then. Nothing that it does ends guard."""
        try:
            found = await asyncio.to_thread(finder.find)
        except Exception as problem:  # a list that we cannot read must not blind guard to the engines that it knows
            self._note(finder.said, f"a mistake of ours: {type(problem).__name__}; what is known stays")
            return
        self._found[finder.said] = found
        restarts, ended = finder.restarts, finder.ended
        self._facts[finder.said] = {name: Facts(restarts.get(name), ended.get(name, "")) for name in {*restarts, *ended}}
        self._note(finder.said, finder.trouble)

    def targets(self) -> list[Target]:
        """All of them, each name and each address once."""
        discover = self._config.discover
        by_name = {target.name: target for target in self._config.engines}
        urls = {target.url.rstrip("/") for target in self._config.engines}
        own: dict[str, tuple[str, str]] = {}
        called = Counter(clean(target.name) for targets in self._found.values() for target in targets)
        for said, targets in self._found.items():
            for target in sorted(targets, key=lambda target: target.url):
                url = target.url.rstrip("/")
                if url not in urls:
                    urls.add(url)
                    name = clean(target.name) or address(url).shown
                    # A name that several have is nobody's: whose it is would change with the order of a list.
                    is_own = name not in by_name and called[name] <= 1
                    name = name if is_own else f"{name} {address(url).shown}"
                    own[name] = said, target.name
                    by_name[name] = target._replace(
                        name=name, token=discover.token, canary_s=discover.canary_s, api_key=discover.api_key
                    )
        self._own = own
        return list(by_name.values())

    def facts(self, name: str) -> Facts:
        """What whoever found this one knows of it."""
        said, called = self._own.get(name, ("", ""))
        return self._facts.get(said, {}).get(called, _NOTHING)


_NOTHING = Facts()


def finders(discover: Discover) -> list[Finder]:
    """One for each place where engines are found."""
    found: list[Finder] = [FileSd(pattern) for pattern in discover.file_sd]
    found += [HttpSd(url) for url in discover.http_sd]
    found += [Pods(discover.kubernetes, Cluster())] if discover.kubernetes is not None else []
    return found
