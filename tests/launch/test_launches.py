"""What `find_launch` and `read_launches` promise."""

from __future__ import annotations

import io
import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.check_flags import check
from plimsoll.launch.command_line import EntryPoint, Launch, find_launch
from plimsoll.launch.files import BYTES_MAX, read_launches
from plimsoll.vllm.versions import engine_named
from tests.each import cases, each, rows

CASES = Path(__file__).parent / "cases.txt"
CAPTURES = Path(__file__).parent.parent / "captures" / "launches"


def found(line: str) -> Launch | None:
    """The launch in one command line, as a shell would hand its words over."""
    return find_launch(shlex.split(line), (), "command line")


def read(text: str | bytes) -> list[Launch]:
    """The launches in a text that comes through standard input."""
    return read_launches("-", io.BytesIO(text.encode() if isinstance(text, str) else text))


def test_options_in_front_of_a_start_are_kept_apart() -> None:
    """No shell runs a command that begins with an option, so that it is somebody's mistake or somebody's word to us."""
    for words, in_front in (
        ("--gpu L4 vllm serve m", ("--gpu", "L4")),
        ("--gpu L4 python -m vllm.entrypoints.openai.api_server --model m", ("--gpu", "L4", "python")),
        ("nice -n 19 vllm serve m --port 80", ()),
        ("-m vllm.entrypoints.openai.api_server --model m", ()),
    ):
        launch = find_launch(words.split(), (), "command line")
        assert launch is not None
        assert launch.in_front == in_front


@each("line", [line for (line,) in rows(CASES, "wrappers")])
def test_wrappers_do_not_hide_vllm_serve(line: str) -> None:
    """Whatever stands in front, the arguments are those behind `serve`."""
    launch = found(line)
    assert launch is not None
    assert (launch.entry, launch.arguments) == (EntryPoint.SERVE, ("m", "--x"))


@each("line", [line for (line,) in rows(CASES, "server module")])
def test_the_server_module_is_an_entry_point(line: str) -> None:
    """The module and its file are API_SERVER, with what follows as arguments."""
    launch = found(line)
    assert launch is not None
    assert (launch.entry, launch.arguments) == (EntryPoint.API_SERVER, ("--model", "m"))


@each("line", [line for (line,) in rows(CASES, "mentions")])
def test_what_only_mentions_vllm_is_no_launch(line: str) -> None:
    """A program that prints, installs or looks for vLLM does not start it."""
    assert found(line) is None


def test_docker_run_gives_the_containers_own_environment() -> None:
    """Only -e reaches a container; a bare -e hands on the caller's value, and an env file is named as not read."""
    line = (
        "docker run -d --rm -it --gpus all -p8000:8000 -e A=1 -eB=2 --env C=3 --env=D=4 -e HF_TOKEN -e KNOWN"
        " --env-file prod.env -v $HOME/hf:/hf --ipc=host --shm-size 16g"
        " registry.example.org:5000/ai/vllm-openai:v0.11.0@sha256:abc --model m --port 8000"
    )
    launch = find_launch(line.split(), (("KNOWN", "yes"), ("HOST_ONLY", "x")), "x", ("HOME",))
    assert launch == Launch(
        source="x",
        entry=EntryPoint.IMAGE,
        arguments=("--model", "m", "--port", "8000"),
        environment=(("A", "1"), ("B", "2"), ("C", "3"), ("D", "4"), ("HF_TOKEN", "$HF_TOKEN"), ("KNOWN", "yes")),
        image="registry.example.org:5000/ai/vllm-openai:v0.11.0@sha256:abc",
        unresolved=("HF_TOKEN",),
        notes=("the variables in prod.env were not read",),
        shm="host",
    )


def test_a_start_command_given_to_an_image_that_starts_by_itself() -> None:
    """vLLM's own image reads it as arguments, and refuses them; another image may have no start of its own."""
    for line, starts in (
        ("docker run vllm/vllm-openai:v0.11.0 vllm serve m", False),
        ("docker run vllm/vllm-openai:v0.14.1 serve m", False),
        ("docker run rocm/vllm serve m", True),
    ):
        launch = found(line)
        assert launch is not None
        checked = check(launch, engine_named(None))
        assert (checked.model, checked.starts) == ("m", starts), line


def test_env_sets_and_takes_away() -> None:
    """`env -u` removes, `env -i` empties, and assignments add, last one wins."""
    given_before = (("A", "1"), ("B", "2"))
    kept = find_launch(shlex.split("env -u A C=3 vllm serve m"), given_before, "x")
    emptied = find_launch(shlex.split("env -i C=3 vllm serve m"), given_before, "x")
    assert kept is not None
    assert emptied is not None
    assert (kept.environment, emptied.environment) == ((("B", "2"), ("C", "3")), (("C", "3"),))


def test_a_systemd_unit() -> None:
    """ExecStart is cut and filled by systemd's rules, with what Environment= sets."""
    (launch,) = read_launches(str(CAPTURES / "vllm.service"))
    assert launch.source == "vllm.service:9"
    assert launch.arguments == (
        *("Qwen/Qwen3-8B", "--port", "8000", "--enable-prefix-caching", "--seed", "1"),
        *("--served-model-name", "%i 100%", "--api-key", "$API_KEY"),
    )
    assert launch.environment[:2] == (("CUDA_VISIBLE_DEVICES", "0,1"), ("VLLM_LOGGING_LEVEL", "INFO"))
    assert launch.unresolved == ("%i", "API_KEY")
    assert launch.notes == ("the variables in /etc/default/vllm were not read",)
    # A drop-in's `ExecStart=` takes back what was above it.
    (launch,) = read("[Service]\nExecStart=/bin/vllm serve a\nExecStart=\nExecStart=-/bin/sh -c 'exec vllm serve b'\n")
    assert launch.arguments == ("b",)


def test_a_quadlet() -> None:
    """Podman's unit is a container: its image, what `Exec=` gives that, and its variables."""
    (launch,) = read("[Container]\nImage=vllm/vllm-openai:v0.25.1\nExec=--model m \\\n  --port ${P}\nEnvironment=A=1\n")
    assert (launch.entry, launch.arguments) == (EntryPoint.IMAGE, ("--model", "m", "--port", "$P"))
    assert (launch.image, launch.environment, launch.unresolved) == ("vllm/vllm-openai:v0.25.1", (("A", "1"),), ("P",))


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("vllm serve m --x '{\"a\": 1}'", ["standard input:1"]),
        ("cat > k.yaml <<EOF\nkind: Pod\nimage: vllm\nEOF\nvllm serve m\n", ["standard input:5"]),
        ("services:\n  a:\n    image: vllm/vllm-openai\n", ["standard input, service a"]),
        ('{"services": {"a": {"image": "vllm/vllm-openai"}}}', ["standard input, service a"]),
        ("\ufeff# comment\n---\nservices: {a: {image: vllm/vllm-openai}}", ["standard input, service a"]),
        ("vllm serve a &\nvllm serve b --port 2 &\nwait\n", ["standard input:1", "standard input:2"]),
        ("[Unit]\n[Service]\nExecStart=vllm serve m\n", ["standard input:3"]),
        (
            "cat > v.service <<'E'\n[Service]\nExecStart=vllm serve m\nE\nvllm serve n\n",
            ["standard input:5", "standard input:3"],
        ),
        ("cat > r.sh <<-E\n\t#!/bin/sh\n\tvllm serve m\n\tE\npython - <<P\nvllm serve n\nP\n", ["standard input:3"]),
        ("cat > c.yaml <<E\nservices: {a: {image: vllm/vllm-openai}}\nE\n", ["standard input, service a"]),
        ("; c\n[program:a]\ncommand=vllm serve m\n  --port 2\n[program:b]\ncommand=true\n", ["standard input, program:a"]),
        ("resources: {}\nrun: |\n  date\n  vllm serve $MODEL\nenvs: {MODEL: m}\n", ["standard input:4"]),
    ],
)
def test_the_kind_of_file_is_seen_in_its_content(text: str, sources: list[str]) -> None:
    """Nothing but the text is needed to tell a script from a manifest, and every launch is returned in order."""
    assert [launch.source for launch in read(text)] == sources


def test_what_a_shell_computes_in_a_here_document_is_unknown() -> None:
    """A launch that an unquoted here-document writes keeps each computed word as one unknown word; a quoted one is text."""
    script = "cat > v.service <<E\n[Service]\nExecStart=vllm serve m --port \\$P --api-key $(cat /k (a)) --seed `s`\nE\n"
    (launch,) = read(script)
    assert launch.arguments == ("m", "--port", "$P", "--api-key", "$(cat /k (a))", "--seed", "`s`")
    assert set(launch.unresolved) == {"P", "$(cat /k (a))", "`s`"}
    (launch,) = read(script.replace("<<E", "<<'E'").replace("\\$P", "2"))
    assert launch.arguments[:5] == ("m", "--port", "2", "--api-key", "$(cat")


def test_a_here_document_that_is_left_out_is_said() -> None:
    """One that cannot be read, and those behind the hundredth, are a note beside the others, or the error where all are."""
    unit = "cat > v.service <<E\n[Service]\nExecStart=vllm serve m\nE\n"
    broken = "cat > k.yaml <<E\nkind: Pod\n  image: vllm\nE\n"
    (launch,) = read(unit + broken)
    assert [note[:38] for note in launch.notes] == ["the here-document at line 6 was not rea"[:38]]
    with pytest.raises(BadInput, match="here-document at line 2 was not read"):
        read(broken)
    launches = read(unit * 101)
    assert len(launches) == 100
    assert all("from line 402 on were not read" in launch.notes[0] for launch in launches)


def test_flags_that_a_broken_continuation_loses_are_noted() -> None:
    """Where a comment or a blank behind a backslash ends the command, the lost flag is named with its line."""
    (launch,) = read("vllm serve m \\\n  --a 1 \\\n  # --b 2 \\\n  --c 3\n")
    assert launch.arguments == ("m", "--a", "1")
    assert launch.notes == ("line 4 does not belong to it: --c would be run as a command of its own",)
    (launch,) = read("vllm serve m \\ \n  --a 1\n")
    assert len(launch.notes) == 2


def test_guesses_and_sourced_files_are_noted() -> None:
    """A value that depends on a branch, a file that was not followed and Windows line ends are said."""
    script = "source /etc/llm.env\r\nif x; then TP=2; else TP=4; fi\r\nvllm serve $MODEL --tensor-parallel-size $TP\r\n"
    (launch,) = read(script)
    assert launch.arguments == ("$MODEL", "--tensor-parallel-size", "2")
    assert launch.unresolved == ("MODEL",)
    assert launch.notes == (
        "TP depends on a branch of the script: its first value was taken, with all that is added to it",
        "not followed: /etc/llm.env; missing variables may be set there",
        "the file has Windows line ends (CRLF); a shell on Linux would not run it as it is",
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *((text.encode("latin-1"), sentence) for text, sentence in cases("launch", "bad_files_are_one_line_with_the_name")),
        (b"\x7fELF\0\0", "a binary file"),
        (b"x" * (BYTES_MAX + 1), "larger than 1 MiB"),
    ],
)
def test_bad_files_are_one_line_with_the_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    """What cannot be a start command is BadInput, in one line that names the file."""
    path = tmp_path / "start.sh"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_launches(str(path))
    assert "start.sh" in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TooLarge) == ("1 MiB" in sentence)


def test_paths_that_cannot_be_read_are_bad_input(tmp_path: Path) -> None:
    """A missing file, a directory, an impossible name and a missing standard input are said in one line."""
    cases = {str(tmp_path / "none.sh"): "no such file", str(tmp_path): "a folder, not a file", "a\0b": "null"}
    (tmp_path / "secret.sh").touch(0)
    if not os.access(tmp_path / "secret.sh", os.R_OK):  # root may read everything
        cases[str(tmp_path / "secret.sh")] = "Permission denied"
    for path, sentence in {**cases, "-": "no standard input", "": "no such file"}.items():
        with pytest.raises(BadInput, match=sentence):
            read_launches(path)


HEADS = "|[Service]\nExecStart=|FROM a\n|services:\n|kind: Pod\n|#!/bin/sh\n|ENV A="
PIECES = (
    "vllm |serve |docker run |-e |A=B |bash -c |'|\"|$A |\n|\\\n|- |: |{|}|[|]|&a |*a |<<: "
    "|CMD |ENV |FROM |-m |env |eval |  |#|=|%|\t"
)


@given(st.sampled_from(HEADS.split("|")), st.lists(st.sampled_from(PIECES.split("|")) | st.text(max_size=4), max_size=40))
def test_any_file_is_launches_or_bad_input(head: str, pieces: list[str]) -> None:
    """Nothing but BadInput is ever raised, always in one line."""
    sentence = ""
    try:
        assert read((head + "".join(pieces)).encode("utf-8", errors="replace"))
    except BadInput as error:
        sentence = str(error)
    assert "\n" not in sentence


def test_a_start_has_what_other_branches_make_of_it() -> None:
    """The launch is the first branch's; the others' are kept beside it, with what is missing in them."""
    (launch,) = read('if x; then A="--enforce-eager"; else A="--swap-space $GIB"; fi\nvllm serve m $A\n')
    assert launch.arguments == ("m", "--enforce-eager")
    assert [(other.arguments, other.unresolved) for other in launch.otherwise] == [(("m", "--swap-space", "$GIB"), ("GIB",))]


def test_programs_of_supervisord_have_their_environment() -> None:
    """Lines that go on are one command; what supervisord fills in is missing; a broken file is one line."""
    (launch,) = read('[program:a]\ncommand=vllm serve m\n  --api-key %(ENV_KEY)s\nenvironment=A="1,5",B=2\n')
    assert launch.arguments == ("m", "--api-key", "%(ENV_KEY)s")
    assert dict(launch.environment) == {"A": "1,5", "B": "2"}
    assert launch.unresolved == ("%(ENV_KEY)s",)
    with pytest.raises(BadInput, match=r"no section headers|contains no section") as caught:
        read("; a\n[program:a\ncommand=vllm serve m\n")
    assert "\n" not in str(caught.value)
