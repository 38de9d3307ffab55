"""The image and all else that a release publishes, built for real on a base made of Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from plimsoll.cli.main import main
from tests.real.small_farm import need, ran

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "Dockerfile .dockerignore README.md LICENSE CHANGELOG.md pyproject.toml lab src docs".split()


class Image(NamedTuple):
    """What a release left, buildah's environment, and a container of the image."""

    release: Path
    env: dict[str, str]
    container: str

    def run(self, *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """A command in the container, as the user that the image names."""
        return ran("buildah", "run", *options, self.container, "--", *words, env=self.env, timeout=120)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Of a copy of the sources in which lab/release.sh has run."""
    need("buildah", "buildah")
    need("mmdebstrap", "mmdebstrap")
    home = tmp_path_factory.mktemp("release")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / name, home / name)
    env = os.environ | {
        "BASE": "debian", "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", "SOURCE_DATE_EPOCH": "1760000000",
        "EXTRAS": "simulate", "PYTHON": need("python3.11", "python3.11"),
    }  # fmt: skip
    made = ran("bash", "lab/release.sh", "--dirty", cwd=home, env=env)
    assert made.returncode == 0, made.stderr[-3000:]
    tag = f"plimsoll:{re.findall(r'plimsoll ([0-9.]+), image', made.stdout)[0]}"
    container = ran("buildah", "from", tag, env=env).stdout.strip()
    yield Image(home / "dist" / "release", env, container)
    ran("buildah", "rm", container, env=env)
    ran("buildah", "rmi", tag, "localhost/plimsoll-base", env=env)


def test_the_image_works_is_not_root_and_a_release_adds_up(image: Image) -> None:
    """plan, simulate (compiled) and guard answer, the wheel is written; checksums hold, SBOM and archive name all wheels."""
    plan = image.run(*"plimsoll plan --json --gpu H100 -- vllm serve meta-llama/Llama-3.1-8B-Instruct".split())
    assert json.loads(plan.stdout)["fits"] is True, plan.stderr
    guard = image.run("plimsoll", "guard", "--engine", "http://127.0.0.1:9", "--looks", "1")
    assert "plimsoll: no engine answered" in guard.stdout + guard.stderr
    replayed = image.run("plimsoll", "simulate", "synthetic:requests=9")
    assert ("9 of 9" in replayed.stdout, "compiling" in replayed.stderr) == (True, False), replayed.stderr
    wheel = image.run("sh", "-c", "plimsoll inside wheel /tmp >&2 && ls /tmp/*.whl /opt/plimsoll/share/*.whl")
    assert len(wheel.stdout.split()) == 2, wheel.stderr
    seen = image.run("sh", "-c", "id -u; touch /var/lib/plimsoll/x && echo state; touch /opt/plimsoll/x || echo no")
    assert seen.stdout.split() == ["65532", "state", "no"]
    folder = image.release
    assert ran("sha256sum", "--quiet", "--check", "SHA256SUMS", cwd=folder).returncode == 0
    bill = json.loads(next(folder.glob("*.spdx.json")).read_text(encoding="utf-8"))
    wheels = {wheel.name for wheel in (folder / "wheels").iterdir()}
    assert {package["packageFileName"] for package in bill["packages"]} == wheels
    assert {name.split("-")[0] for name in wheels} > {"plimsoll_line", "aiohttp", "click", "rich"}
    with tarfile.open(next(folder.glob("*-offline.tar"))) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert names >= wheels | {"SHA256SUMS", "image-digest.txt"} | {path.name for path in folder.glob("*-image.tar")}
    assert re.fullmatch(r"sha256:[0-9a-f]{64}\n", (folder / "image-digest.txt").read_text())


def test_the_init_container_of_a_patch_writes_the_wheel_that_vllm_imports(image: Image, tmp_path: Path) -> None:
    """Its own command, in the image, with its volume; the file is what PYTHONPATH names, and gate and probe come out of it."""
    deployment = ROOT / "tests" / "captures" / "deployments" / "docs-page.yaml"
    assert main(["assets", str(tmp_path), "--for", "patch", str(deployment), "--image", "plimsoll:1"]) == 0
    (file,) = (tmp_path / "patch").glob("deployment-*.yaml")
    spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    (init,), (server,) = spec["initContainers"], spec["containers"]
    (mount,), volume = init["volumeMounts"], tmp_path / "volume"
    volume.mkdir(mode=0o777)
    volume.chmod(0o777)  # as an emptyDir is
    done = image.run(*init["command"], options=("--volume", f"{volume}:{mount['mountPath']}"))
    assert done.returncode == 0, done.stderr
    (path,) = [one["value"] for one in server["env"] if one["name"] == "PYTHONPATH"]
    assert any(one["mountPath"] == mount["mountPath"] for one in server["volumeMounts"])
    wheel = volume / Path(path).relative_to(mount["mountPath"])
    asked = "import plimsoll.inside as inside; print(inside.__file__, inside.Gate.__module__, inside.Probe.__module__)"
    found = ran("python3", "-S", "-c", asked, env={**os.environ, "PYTHONPATH": str(wheel)})
    assert found.stdout.split() == [f"{wheel}/plimsoll/inside/__init__.py", "plimsoll.inside.gate", "plimsoll.inside.probe"]
