"""The nginx recipe as it stands in docs/balancers.md, with the real nginx, as an ordinary user: no request fails."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lab.engine.server import free_port
from plimsoll.guard.adapters.hooks import CommandBalancer
from tests.real.small_farm import CONFIGS, Backend, backends, drained_and_put_back, need, running, until

pytestmark = pytest.mark.once
DOCS = Path(__file__).parents[2] / "docs" / "balancers.md"
NOBODY = 65534


def block(kind: str, first: str) -> str:
    """The block of the page that begins so."""
    for found in re.findall(rf"```{kind}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        if first in found:
            return str(found)
    raise AssertionError(f"docs/balancers.md has no such block: {first}")


class Nginx:
    """The recipe's files in a folder of the ordinary user's own, and nginx with them."""

    def __init__(self, folder: Path, servers: list[Backend]) -> None:
        self.folder, self.port = folder, free_port()
        self.upstream, self.main, self.script = (folder / name for name in ("upstream.conf", "nginx.conf", "plimsoll-nginx"))
        asks = free_port()
        text = block("nginx", "plimsoll_generation").replace("127.0.0.1:9180", f"127.0.0.1:{asks}")
        for host, server in zip(("10.0.0.1", "10.0.0.2"), servers, strict=True):
            text = text.replace(f"{host}:8000", f"127.0.0.1:{server.port}")
        self.upstream.write_text(text, encoding="utf-8")
        self.main.write_text(CONFIGS["nginx around the recipe"].format(folder=folder, port=self.port), encoding="utf-8")
        self.script.write_text(block("sh", "plimsoll-nginx"), encoding="utf-8")
        self.script.chmod(0o755)
        self.environment = {
            "PLIMSOLL_NGINX_FILE": str(self.upstream), "PLIMSOLL_NGINX_CONF": str(self.main),
            "PLIMSOLL_NGINX_ASKS": f"http://127.0.0.1:{asks}/generation", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        }  # fmt: skip
        self._as = []
        if os.geteuid() == 0:  # an ordinary user is what the recipe promises
            self._as = [need("setpriv", "util-linux"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            for path in (folder, *folder.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        self.words = (*self._as, need("nginx", "nginx"), "-c", str(self.main), "-g", "daemon off;")

    def balancer(self, engine: str) -> CommandBalancer:
        """As guard would have it."""
        words = [*self._as, str(self.script), "{verb}", "{engine}"]
        return CommandBalancer(words, engine, environment=self.environment)


@contextlib.asynccontextmanager
async def farm() -> AsyncIterator[tuple[Nginx, Backend, Backend]]:
    folder = Path(tempfile.mkdtemp(prefix="plimsoll-nginx-"))
    async with backends("a", "b") as (one, two):
        nginx = Nginx(folder, [one, two])
        async with running(*nginx.words):
            await until((folder / "nginx.pid").exists)
            yield nginx, one, two
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _installed() -> None:
    need("nginx", "nginx")
    need("curl", "curl")


async def test_a_server_is_taken_out_and_put_back_under_load() -> None:
    """Read back from the running workers; no request of 20 clients fails; what the file alone says proves nothing."""
    async with farm() as (nginx, one, two):
        balancer = nginx.balancer("a")
        await drained_and_put_back(balancer, nginx.port, one, two)
        assert await balancer.connections() is None
        text = nginx.upstream.read_text(encoding="utf-8")
        changed = re.sub(r'default "\d+"', 'default "99"', text.replace("; # a", " down; # a"))
        nginx.upstream.write_text(changed, encoding="utf-8")
        assert await balancer.is_out() is None
        assert (await balancer.take_out()).is_done is True
        assert await balancer.is_out() is True
        assert (await balancer.take_out()).message == "it was out already"


async def test_the_last_one_a_stranger_and_a_broken_configuration_are_refused() -> None:
    """Not done, with the reason; the file is as it was."""
    async with farm() as (nginx, _, _):
        assert (await nginx.balancer("a").take_out()).is_done is True
        last = await nginx.balancer("b").take_out()
        assert (last.is_done, last.message) == (False, "exit code 1: nobody else is in: it stays in")
        for name in ("c", ".", "a; reboot", "a|b", ""):
            assert (await nginx.balancer(name).take_out()).is_done is False, name
        before = nginx.upstream.read_text(encoding="utf-8")
        whole = nginx.main.read_text(encoding="utf-8")
        nginx.main.write_text(whole + "nonsense;", encoding="utf-8")
        broken = await nginx.balancer("a").put_back()
        assert broken.is_done is False
        assert "as it was" in broken.message
        assert nginx.upstream.read_text(encoding="utf-8") == before
        nginx.main.write_text(whole, encoding="utf-8")
        assert (await nginx.balancer("a").put_back()).is_done is True
