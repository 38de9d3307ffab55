"""Which vLLM a launch is about, where nobody said it with --vllm."""

from __future__ import annotations

from pathlib import Path

from plimsoll.cli.flags import FlagsOptions
from plimsoll.launch.command_line import engine_meant, launches_named, version_in_image
from plimsoll.launch.installed_vllm import launch_of_process
from plimsoll.vllm.versions import newest
from tests.each import each


@each(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.11.0", "0.11.0"),
        ("ghcr.io/acme/vllm-openai:0.10.1.1-cu128@sha256:abc", "0.10.1.1"),
        ("rocm/vllm:rocm6.4.1_vllm_0.9.1_20250702", "0.9.1"),
        ("registry:5000/vllm:v0.9.0rc1", "0.9.0rc1"),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai", None),
        ("nvcr.io/nvidia/vllm:25.09-py3", None),
        ("acme/vllm-chat:1.4.2", None),
        ("acme/vllm-router:v0.1.2", None),
        ("ubuntu:0.11.0", None),
    ],
)
def test_the_version_in_an_image(image: str, version: str | None) -> None:
    """The tag of an image that serves vLLM names its version, another's or a moving tag names none."""
    assert version_in_image(image) == version


@each(
    ("text", "requirement", "release", "because"),
    [
        ("pip install vllm==0.9.2\nvllm serve m\n", "", "0.9.2", "pinned in start.sh"),
        ("uvx vllm@0.10.0 serve m\nvllm serve m\n", "", "0.10.0", "pinned in start.sh"),
        ("export VLLM_VERSION=0.11.0\nvllm serve m\n", "", "0.11.0", "pinned in start.sh"),
        ("# once vllm==0.6.0\nvllm serve m\n", "vllm[audio]==0.9.1\ntorch\n", "0.9.1", "pinned in requirements.txt"),
        ("pip install vllm==0.9.2\npip install vllm==0.9.1\nvllm serve m\n", "", newest(), "the newest known"),
        (
            "docker run vllm/vllm-openai:v0.8.5 --model m\n",
            "vllm==0.9.1\n",
            "0.8.5",
            "the tag of the image vllm/vllm-openai:v0.8.5",
        ),
        ("vllm serve m\n", "vllm>=0.9.1\n", newest(), "the newest known"),
    ],
)
def test_what_stands_beside_the_command_decides(
    tmp_path: Path, text: str, requirement: str, release: str, because: str
) -> None:
    """The image's tag comes before a pin in the file, that before one beside it, and only then the newest is meant."""
    (tmp_path / "start.sh").write_text(text)
    (tmp_path / "requirements.txt").write_text(requirement)
    launch, _ = launches_named(FlagsOptions(rest=(str(tmp_path / "start.sh"),)), "flags")[-1]
    engine = engine_meant(launch, None)
    assert (engine.release, engine.because) == (release, because)
    assert engine_meant(launch, "0.7.0").because == ""


def test_a_running_server_says_its_version(tmp_path: Path) -> None:
    """The package in the environment of the process's Python is the one that runs."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"/opt/env/bin/python\0/opt/env/bin/vllm\0serve\0m")
    metadata = tmp_path / "7/root/opt/env/lib/python3.12/site-packages/vllm-0.10.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: vllm\nVersion: 0.10.2\n")
    (metadata.parent / "vllm").mkdir()
    engine = engine_meant(launch_of_process(7, tmp_path), None)
    assert (engine.release, engine.because) == ("0.10.2", "runs as pid 7")
