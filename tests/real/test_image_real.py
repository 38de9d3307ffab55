"""The image and all else that a release publishes, built for real on a base made of Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from plimsoll.cli.main import main
from tests.real.small_farm import need

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "Dockerfile .dockerignore README.md LICENSE CHANGELOG.md pyproject.toml lab src docs".split()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str], str]]:
    """A copy of the sources in which lab/release.sh has run, buildah's environment, and a container of the image."""
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
        "PYTHON": need("python3.11", "python3.11"),
    }  # fmt: skip
    made = subprocess.run(["bash", "lab/release.sh", "--dirty"], cwd=home, env=env, text=True, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    tag = f"plimsoll:{re.findall(r'plimsoll ([0-9.]+), image', made.stdout)[0]}"
    container = subprocess.run(["buildah", "from", tag], env=env, text=True, capture_output=True, check=True).stdout.strip()
    yield home / "dist" / "release", env, container
    subprocess.run(["buildah", "rm", container], env=env, capture_output=True, check=False)
    subprocess.run(["buildah", "rmi", tag, "localhost/plimsoll-base"], env=env, capture_output=True, check=False)


def inside(image: tuple[Path, dict[str, str], str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command in the container, as the user that the image names."""
    command = ["buildah", "run", image[2], "--", *words]
    return subprocess.run(command, env=image[1], text=True, capture_output=True, timeout=120, check=False)


def test_the_image_plans_guards_and_hands_out_the_wheel(image: tuple[Path, dict[str, str], str]) -> None:
    """plan answers, guard looks at an engine that is not there and says so, `inside wheel` writes the wheel."""
    plan = inside(
        image, "plimsoll", "plan", "--json", "--gpu", "H100", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"
    )
    assert json.loads(plan.stdout)["fits"] is True, plan.stderr
    guard = inside(image, "plimsoll", "guard", "--engine", "http://127.0.0.1:9", "--looks", "1")
    assert "plimsoll: no engine answered" in guard.stdout + guard.stderr
    wheel = inside(image, "sh", "-c", "plimsoll inside wheel /tmp >&2 && ls /tmp/*.whl /opt/plimsoll/share/*.whl")
    assert len(wheel.stdout.split()) == 2, wheel.stderr


def test_the_init_container_of_a_patch_writes_the_wheel_that_vllm_imports(
    image: tuple[Path, dict[str, str], str], tmp_path: Path
) -> None:
    """Its own command, in the image, with its volume; the file is what PYTHONPATH names, and gate and probe come out of it."""
    deployment = ROOT / "tests" / "captures" / "deployments" / "docs-page.yaml"
    assert main(["assets", str(tmp_path), "--for", "patch", str(deployment), "--image", "plimsoll:1"]) == 0
    (file,) = (tmp_path / "patch").glob("deployment-*.yaml")
    spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    (init,), (server,) = spec["initContainers"], spec["containers"]
    (mount,), volume = init["volumeMounts"], tmp_path / "volume"
    volume.mkdir(mode=0o777)
    volume.chmod(0o777)  # as an emptyDir is
    command = ["buildah", "run", "--volume", f"{volume}:{mount['mountPath']}", image[2], "--", *init["command"]]
    ran = subprocess.run(command, env=image[1], text=True, capture_output=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    (path,) = [one["value"] for one in server["env"] if one["name"] == "PYTHONPATH"]
    assert any(one["mountPath"] == mount["mountPath"] for one in server["volumeMounts"])
    wheel = volume / Path(path).relative_to(mount["mountPath"])
    asked = "import plimsoll.inside as inside; print(inside.__file__, inside.Gate.__module__, inside.Probe.__module__)"
    words = ["python3", "-S", "-c", asked]
    found = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(wheel)}, text=True, capture_output=True, check=True)
    assert found.stdout.split() == [f"{wheel}/plimsoll/inside/__init__.py", "plimsoll.inside.gate", "plimsoll.inside.probe"]


def test_the_image_is_not_root_and_owns_nothing_but_its_state(image: tuple[Path, dict[str, str], str]) -> None:
    """The user is 65532; of plimsoll's folders only /var/lib/plimsoll is writable, so that a read-only root is no trouble."""
    seen = inside(image, "sh", "-c", "id -u; touch /var/lib/plimsoll/x && echo state; touch /opt/plimsoll/x || echo no")
    assert seen.stdout.split() == ["65532", "state", "no"]


def test_a_release_adds_up(image: tuple[Path, dict[str, str], str]) -> None:
    """Checksums hold, the SBOM names every wheel of the image, and the archive for offline sites holds all of it."""
    folder = image[0]
    subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=folder, check=True)
    bill = json.loads(next(folder.glob("*.spdx.json")).read_text(encoding="utf-8"))
    wheels = {wheel.name for wheel in (folder / "wheels").iterdir()}
    assert {package["packageFileName"] for package in bill["packages"]} == wheels
    assert {name.split("-")[0] for name in wheels} > {"plimsoll_line", "aiohttp", "click", "rich"}
    with tarfile.open(next(folder.glob("*-offline.tar"))) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert names >= wheels | {"SHA256SUMS", "image-digest.txt"} | {path.name for path in folder.glob("*-image.tar")}
    assert re.fullmatch(r"sha256:[0-9a-f]{64}\n", (folder / "image-digest.txt").read_text())
