"""The planned command made ready: flags, timers, allocator, secrets, and what is refused."""

from __future__ import annotations

import pytest

from plimsoll.assets.launch_command import Ready
from plimsoll.errors import BadInput
from tests.assets.plans import MODELS, SECRET, made_ready, plan_of

LLAMA = MODELS[0]
SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _ready(*words: str, vllm: str = "0.32.0", gpu: str = "H100", before: tuple[str, ...] = ()) -> Ready:
    return made_ready(plan_of(*before, "vllm", "serve", LLAMA, *words, vllm=vllm, gpu=gpu))


def test_inside_and_a_time_to_shut_down_are_added() -> None:
    """A plain command gets the probe, the gate and a minute for requests in flight."""
    command = _ready().command
    assert command.words == (
        "vllm", "serve", LLAMA, "--shutdown-timeout", "60", "--worker-extension-cls", "plimsoll.inside.Probe",
        "--middleware", "plimsoll.inside.Gate",
    )  # fmt: skip
    assert command.has_gate
    assert command.port == 8000


def test_what_the_command_says_of_itself_is_heeded() -> None:
    """Its port, its name and its timeout are those of the files."""
    found = _ready("--port", "9001", "--served-model-name", "a", "b", "--shutdown-timeout", "90")
    assert (found.command.port, found.timers.shutdown_s) == (9001, 90)
    assert found.command.words.count("--shutdown-timeout") == 1


def test_a_timeout_that_cannot_be_is_changed_and_said() -> None:
    """Five seconds are too few, eleven hours more than guard waits; both are told."""
    for wish, became in (("5", 10), ("40000", 1500)):
        found = _ready("--shutdown-timeout", wish)
        assert found.timers.shutdown_s == became
        assert any(f"--shutdown-timeout {wish} became {became}" in note for note in found.notes)


def test_an_old_release_is_not_given_a_flag_that_it_lacks() -> None:
    """0.17.1 has no --shutdown-timeout: the gate waits for the requests, and that is said."""
    found = _ready(vllm="0.17.1")
    assert "--shutdown-timeout" not in found.command.words
    assert "plimsoll.inside.Gate" in found.command.words
    assert any("has no --shutdown-timeout" in note for note in found.notes)


@pytest.mark.parametrize("vllm", ["0.8.0", "0.10.2", "0.12.0", "0.20.0", "0.25.1", "0.32.0"])
def test_every_release_from_0_8_on_gets_the_gate(vllm: str) -> None:
    """The oldest that takes worker extensions and all after it."""
    assert _ready(vllm=vllm).command.has_gate


def test_secrets_become_variables_that_are_filled_in_by_hand() -> None:
    """Neither a key nor a token reaches a file, and neither does the mark that hides them."""
    found = _ready(
        "--api-key", SECRET, "--hf-token", "hf_abcdefghijklmnopqrstuvwxyz012345", before=("env", f"OTHER_TOKEN={SECRET}")
    )
    assert set(found.command.secrets) == {"VLLM_API_KEY", "HF_TOKEN", "OTHER_TOKEN"}
    assert "redacted" not in repr(found.command)
    assert "--api-key" not in found.command.words


def test_expandable_segments_where_they_help() -> None:
    """One NVIDIA card, plain serving."""
    assert SEGMENTS in _ready().command.environment


@pytest.mark.parametrize(
    ("words", "gpu"),
    [
        (("--tensor-parallel-size", "2"), "H100"),
        (("--data-parallel-size", "2"), "H100"),
        (("--enable-sleep-mode",), "H100"),
        (("--enable-cumem-allocator",), "H100"),
        (("--kv-offloading-size", "8"), "H100"),
        (("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'), "H100"),
        ((), "MI300X"),
    ],
)
def test_no_expandable_segments_where_they_break(words: tuple[str, ...], gpu: str) -> None:
    """Several GPUs, a pool of vLLM's own, a KV connector and AMD's cards start without them."""
    assert SEGMENTS not in _ready(*words, gpu=gpu).command.environment


def test_an_allocator_setting_of_ones_own_stays() -> None:
    """Nothing is put beside it, and what may not start is said."""
    own = _ready(before=("env", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"))
    assert own.command.environment == (("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512"),)
    risky = _ready("--tensor-parallel-size", "2", before=("env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    assert any("may not start" in note for note in risky.notes)


def test_another_extension_keeps_its_place() -> None:
    """vLLM takes one: the probe then comes as a plugin."""
    command = _ready("--worker-extension-cls", "my.Ext").command
    assert ("PLIMSOLL_PROBE", "plugin") in command.environment
    assert "plimsoll.inside.Probe" not in command.words


def test_a_server_without_a_gate_is_said() -> None:
    """The Rust front-end takes no middleware: no gate, and a note that says what that means."""
    found = _ready(before=("env", "VLLM_USE_RUST_FRONTEND=1"))
    assert not found.command.has_gate
    assert "--middleware" not in found.command.words
    assert any("guard only observes" in note for note in found.notes)


def test_dev_mode_is_pointed_out() -> None:
    """Whoever reaches the port could then do anything to the engine."""
    assert any("VLLM_SERVER_DEV_MODE" in note for note in _ready(before=("env", "VLLM_SERVER_DEV_MODE=1")).notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--uds", "/run/v.sock"), "--uds"),
        (("--ssl-keyfile", "k.pem"), "TLS"),
        (("--headless",), "several machines"),
        (("--nnodes", "2"), "several machines"),
        (("--data-parallel-size", "2", "--data-parallel-address", "10.0.0.1"), "several machines"),
        (("--port", "0"), "no port"),
        (("--override-generation-config", '{"token": "hf_abcdefghijklmnopqrstuvwxyz012345"}'),
         "the plan hides"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    """No file is better than one that does not start."""
    with pytest.raises(BadInput, match=said) as caught:
        _ready(*words)
    assert "\n" not in str(caught.value)


def test_one_machine_is_no_several() -> None:
    """--nnodes 1 is the default, spelled out."""
    assert _ready("--nnodes", "1").command.has_gate
