"""The certificate: what is certified must hold, what is not must say which request and which flag."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.certify.__main__ import HERE, main
from lab.gpu.models import config_of
from plimsoll.cli.main import parse
from plimsoll.plan.certify import Certificate, Kind
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command
from tests.each import cases

ROOT = Path(__file__).resolve().parents[2]
MODELS = json.loads((ROOT / "lab" / "gpu" / "failure_runs.json").read_text(encoding="utf-8"))["models"]
RUNS = json.loads((ROOT / "tests/captures/vllm-0.25.1-h200-failures/results.json").read_text(encoding="utf-8"))
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
FIRST = ("env", "VLLM_USE_V2_MODEL_RUNNER=0")
SERVE = ("vllm", "serve", LLAMA)
LOGS = ROOT / "tests" / "captures" / "vllm-0.25.1-h200-failures"
SIZES = {"MiB": 2**20, "GiB": 2**30}


def certificate(*words: str, gpu: str = "H100", vllm: str = "0.32.0", used: str = "0") -> Certificate:
    """The certificate of a command."""
    whole = ["--gpu", gpu, "--vllm", vllm, "--used-gib", used, "--", *words]
    return read_command(parse(ServerOptions, whole), learned=False).certify()


def recorded(name: str, folder: Path, used: str = "0") -> Certificate:
    """The certificate of a run that was recorded on an H200."""
    run: dict[str, Any] = next(run for run in RUNS if run["name"] == name)
    (folder / "config.json").write_text(json.dumps(config_of(MODELS, run["model"])), encoding="utf-8")
    arguments = run["args"][run["args"].index("--port") + 2 :]
    environment = [f"{key}={value}" for key, value in run["env"].items()]
    return certificate("env", *environment, "vllm", "serve", str(folder), *arguments, gpu="H200", vllm="0.25.1", used=used)


def kind_of(found: Certificate, name: str) -> Kind:
    """One kind of a certificate."""
    return next(kind for kind in found.kinds if kind.phase.kind == name)


@pytest.mark.parametrize(("run", "kind", "units"), cases("plan", "a_command_that_a_request_killed_is_not_certified"))
def test_a_command_that_a_request_killed_is_not_certified(run: str, kind: str, units: int, tmp_path: Path) -> None:
    """Each recorded killer's kind is listed, and the request that killed is no smaller than the smallest said to do it."""
    found = recorded(run, tmp_path)
    assert not found.certified
    smallest = kind_of(found, kind).smallest
    assert smallest is not None
    assert units >= smallest


def test_a_neighbour_that_takes_the_rest_is_not_certified(tmp_path: Path) -> None:
    """The recorded killer `neighbour` is certified for a card of its own and not beside the process that killed it."""
    assert recorded("neighbour", tmp_path).certified
    assert not recorded("neighbour", tmp_path, used="13.5").certified


@pytest.mark.parametrize("run", ["adapter-room", "pictures-room", "healthy", "preemption-storm", "snapshot", "wake-up"])
def test_commands_that_ran_with_room_are_certified(run: str, tmp_path: Path) -> None:
    """The certificate does not refuse everything: recorded servers that had room and lived are certified."""
    assert recorded(run, tmp_path).certified


OPEN = {
    "first runner": (*FIRST, *SERVE, "--max-model-len", "8192"),
    "little room": (*SERVE, "--gpu-memory-utilization", "0.95"),
    "penalties": (*FIRST, *SERVE),
    "pictures": ("vllm", "serve", "Qwen/Qwen3-VL-8B-Instruct", "--max-model-len", "65536", "--skip-mm-profiling"),
    "all log-probabilities": (*SERVE, "--max-logprobs", "-1"),
    "a cache of a given size": (*SERVE, "--kv-cache-memory-bytes", "62G"),
    "adapters": (*SERVE, "--enable-lora", "--max-lora-rank", "256", "--kv-cache-memory-bytes", "56G"),
}


@pytest.mark.parametrize("name", OPEN)
def test_every_flag_that_is_said_to_close_a_kind_closes_it(name: str) -> None:
    """The command with the flag added is certified again as a user would, and the kind is no longer open."""
    words = OPEN[name]
    found = certificate(*words)
    assert found.open_kinds
    for kind in found.open_kinds:
        assert kind.closes, f"{kind.phase.kind} has no flag"
        if kind.closes.startswith("leave out "):
            changed = [word for word in words if word != kind.closes.removeprefix("leave out ")]
        else:
            changed = [*words, *shlex.split(kind.closes)]
        again = certificate(*changed)
        assert not kind_of(again, kind.phase.kind).is_open, f"{kind.closes} leaves {kind.phase.kind} open"
        assert again.ledger.fits
    if found.closes_all:
        assert certificate(*words, *found.closes_all.split()).certified


@pytest.mark.parametrize(("words", "said"), cases("plan", "what_cannot_be_known_is_never_certified"))
def test_what_cannot_be_known_is_never_certified(words: tuple[str, ...], said: str) -> None:
    """A term that nobody counted is named, with room for anything beside it, and the answer is no."""
    found = certificate(*SERVE, "--gpu-memory-utilization", "0.5", "--max-model-len", "8192", *words)
    assert not found.certified
    assert any(said in unknown.reason for unknown in found.unknown)


def test_releases_and_cards_that_nobody_counted_are_never_certified() -> None:
    """The terms are those of 0.25.1 to 0.32.0; another maker's kernels take another sampler's memory."""
    for release in ("0.24.0", "0.19.0"):
        found = certificate(*SERVE, "--gpu-memory-utilization", "0.5", vllm=release)
        assert not found.certified
        assert release in found.unknown[0].reason
    assert not certificate(*SERVE, "--gpu-memory-utilization", "0.5", gpu="MI300X").certified


def test_a_chosen_runner_is_not_in_doubt() -> None:
    """The same flags with the runner named in the environment, or harmless values of them, leave nothing unknown."""
    words = (*SERVE, "--gpu-memory-utilization", "0.5", "--max-model-len", "8192")
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert certificate("env", "VLLM_USE_V2_MODEL_RUNNER=1", *words, *drafts).certified
    assert certificate(*words, "--distributed-executor-backend", "mp").certified


def test_the_account_adds_up_and_the_smallest_request_is_the_edge() -> None:
    """Room and spare are the sums of what is shown; one unit less fits into the spare memory, the smallest does not."""
    for words in OPEN.values():
        found = certificate(*words)
        assert sum(term.size for term in found.terms) == found.room - found.pieces
        assert found.spare == found.room - found.pieces - sum(resident.size for resident in found.residents)
        assert all(term.source for term in found.terms)
        assert all(kind.phase.source and kind.phase.why for kind in found.kinds)
        for kind in found.open_kinds:
            if kind.phase.kind == "batch" or kind.smallest in (None, 1):
                continue
            assert kind.smallest is not None
            assert kind.phase.bytes_of(kind.smallest) > kind.spare >= kind.phase.bytes_of(kind.smallest - 1)


def test_less_room_never_certifies_more() -> None:
    """Utilisation, neighbours, tokens and sequences only ever open kinds; no smallest request grows with them."""
    dice = random.Random(24)
    for _ in range(12):
        runner = FIRST if dice.random() < 0.5 else ()
        share, tokens, rows = dice.uniform(0.5, 0.9), dice.choice([2048, 8192]), dice.choice([64, 512])
        command = (*runner, *SERVE, "--max-model-len", "8192", "--max-num-batched-tokens", str(tokens))

        def at(share: float, rows: int, used: str = "0", command: tuple[str, ...] = command) -> dict[str, int | None]:
            words = (*command, "--max-num-seqs", str(rows), "--gpu-memory-utilization", f"{share:.3f}")
            return {kind.phase.kind: kind.smallest for kind in certificate(*words, used=used).kinds}

        wide = at(share, rows)
        for narrow in (at(share + 0.05, rows), at(share, rows * 2), at(share, rows, used="1.5")):
            for kind, smallest in wide.items():
                now = narrow[kind]
                assert smallest is None or (now is not None and now <= smallest), f"{command}: {kind} grew"


def test_no_flag_refuses_prompt_log_probabilities() -> None:
    """--max-logprobs 0 still admits prompt_logprobs 0, which makes the same logits: the smallest request stays as it is."""
    plain = kind_of(certificate(*OPEN["first runner"]), "prompt_logprobs")
    none = kind_of(certificate(*OPEN["first runner"], "--max-logprobs", "0"), "prompt_logprobs")
    assert plain.smallest is not None
    assert none.smallest is not None
    assert abs(plain.smallest - none.smallest) < 0.01 * plain.smallest
    assert plain.closes.startswith("--max-num-batched-tokens")


def test_what_vllm_profiles_is_not_counted_twice() -> None:
    """An encoder that the profile run held costs nothing more; without the profile run, or beside a given cache, it does."""
    command = ("vllm", "serve", "Qwen/Qwen3-VL-8B-Instruct", "--max-model-len", "32768", "--max-num-seqs", "64")
    assert kind_of(certificate(*command), "pictures").phase.covered
    assert not kind_of(certificate(*command, "--skip-mm-profiling"), "pictures").phase.covered
    assert not kind_of(certificate(*command, vllm="0.26.0"), "pictures").phase.covered
    assert not kind_of(certificate(*command, "--kv-cache-memory-bytes", "8G"), "pictures").phase.covered


def asked_for(run: str) -> float:
    """The allocation that failed, as torch printed it."""
    text = (LOGS / f"{run}.log").read_text(encoding="utf-8", errors="replace")
    size, unit = re.findall(r"Tried to allocate ([\d.]+) (MiB|GiB)", text)[-1]
    return float(size) * SIZES[unit]


def test_the_copy_that_failed_is_counted_twice_over(tmp_path: Path) -> None:
    """8,000 prompt tokens failed at one 32-bit copy of their logits; an adapter's widest matrix at the largest rank."""
    failed = asked_for("logits")
    assert abs(failed - 8000 * 128256 * 4) < 0.01 * failed
    kind = kind_of(recorded("logits", tmp_path), "prompt_logprobs")
    assert kind.phase.bytes_of(8000) >= 2.5 * failed
    kind = kind_of(recorded("lora", tmp_path), "adapter")
    assert asked_for("lora") <= kind.phase.bytes_of(1) <= 1.05 * asked_for("lora")


def test_the_encoder_is_counted_wider_than_what_failed(tmp_path: Path) -> None:
    """One tensor of 154 MiB could not be had for a picture of 15,625 tokens; the kind counts many of that width."""
    found = recorded("multimodal", tmp_path)
    kind = kind_of(found, "pictures")
    assert kind.phase.bytes_of(15625) > 5 * asked_for("multimodal")
    assert found.step.item_tokens == 16384  # the processor's own limit; films are not admitted


def test_a_prompt_in_the_second_runner_costs_two_chunks_whatever_its_length() -> None:
    """Logits of all rows of the step are made 1,024 at a time, and the last chunk lives until the next is there."""
    kind = kind_of(certificate(*SERVE), "prompt_logprobs")
    assert kind.phase.fixed_bytes >= 2 * 1024 * 128256 * 2
    assert kind.phase.bytes_of(2) < 1.01 * kind.phase.bytes_of(200)


def test_a_prompt_that_is_read_in_turns_holds_more() -> None:
    """With a threshold for long prompts a chunk is smaller than its step, and each keeps all rows of that step."""
    plain = kind_of(certificate(*SERVE), "prompt_logprobs").phase.bytes_per_unit
    turns = kind_of(certificate(*SERVE, "--long-prefill-token-threshold", "512"), "prompt_logprobs").phase.bytes_per_unit
    assert turns > 4 * plain


def test_the_profile_s_reserve_is_not_taken_for_more_than_it_is() -> None:
    """Since 0.28 the second runner's profile does not copy its logits: a peak that was the sampler's reserves less."""
    words = (*SERVE, "--max-num-batched-tokens", "2048", "--max-num-seqs", "2048", "--enforce-eager")
    old, new = certificate(*words, vllm="0.27.1"), certificate(*words)
    assert old.ledger.activation.why.startswith("sampler")
    assert new.ledger.activation.low < old.ledger.activation.low


def test_forty_commands_are_certified_on_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command gets its answer, some yes and some no; the trials for the GPU are the ones that the answers make."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trials = tmp_path / "h200.json"
    assert main(["--h200", str(trials)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 41
    answers = [line.split()[1] for line in lines[:-1]]
    assert set(answers) == {"certified", "not"}
    assert 10 <= answers.count("certified") <= 30
    assert trials.read_text(encoding="utf-8") == (HERE / "h200.json").read_text(encoding="utf-8")
