"""The table of cards, and the ways people name them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lab import write_gpu_docs
from plimsoll.errors import BadInput
from plimsoll.hardware.cards import AMBIGUOUS, GPUS, INSTANCES, Ambiguous, Gpu, Vendor, gpu_named
from plimsoll.units import GIB
from tests.each import cases, each

NAMES = Path(__file__).with_name("names.txt")  # what nvidia-smi, rocm-smi, clouds and people say, and the card
STARTS = Path(__file__).parents[3] / "shared" / "data" / "startups" / "startups.jsonl"

each_card = each("gpu", GPUS, ids=lambda gpu: gpu.name)

# What the table of starts calls a card, though no card can be told from it.
UNNAMED = re.compile(r"^(AMD |Ada )?(ROCm|SM89|cc 8\.9|\d+ GB)")
# Names in the table of starts that are no card of ours, and why.
NOT_OURS = dict(cases("hardware", "cards_that_are_not_ours"))
# Totals there that we do not follow, and why.
NOT_FOLLOWED = {"RTX 2060 12GB": "12.0 is the size on the box: rounded by its author, or read under WSL"}


def key(name: str) -> str:
    """A spelling without what a lookup must not care about; written apart from the code it checks."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in {"nvidia", "amd", "geforce", "tesla", "instinct"})


def card_names_in(text: str) -> list[str]:
    """The cards that a `gpu` of the table of starts names."""
    bare = re.sub(r"\(.*?\)", "", text).replace(" class", "").strip()
    return [] if UNNAMED.search(bare) or re.search("not (stated|named)", text) else [part.strip() for part in bare.split(" + ")]


def candidates_for(name: str) -> list[Gpu]:
    """The one card of that name, or every card that a deliberately ambiguous name may mean."""
    unclear = [entry for entry in AMBIGUOUS if key(name) in {key(spelling) for spelling in entry.names}]
    return [gpu_named(card) for card in unclear[0].candidates] if unclear else [gpu_named(name)]


def starts() -> list[dict[str, object]]:
    """The rows of public starts that name a card."""
    if not STARTS.exists():
        pytest.skip(f"the table of public starts is not part of this repository: {STARTS}")
    rows = [json.loads(line) for line in STARTS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["gpu"]]


def test_no_spelling_means_two_cards() -> None:
    """The table covers the cards people ask about, each once; a cloud's machine type leads to one of them."""
    assert len(GPUS) >= 25
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    owner: dict[str, str] = {}
    for gpu in GPUS:
        for spelling in (gpu.name, *gpu.aliases):
            assert owner.setdefault(key(spelling), gpu.name) == gpu.name, f"{spelling}: also {owner[key(spelling)]}"
    for unclear in AMBIGUOUS:
        for spelling in unclear.names:
            assert owner.setdefault(key(spelling), spelling) not in {gpu.name for gpu in GPUS}, spelling
    assert {card for _, card in INSTANCES} <= {gpu.name for gpu in GPUS}


@each_card
def test_every_spelling_finds_its_card(gpu: Gpu) -> None:
    """Each name and alias resolves, in any case and with any separator."""
    for spelling in (gpu.name, *gpu.aliases):
        for typed in (spelling, spelling.upper(), spelling.replace(" ", "-"), spelling.replace("-", "_"), f" {spelling} "):
            assert gpu_named(typed) is gpu


@each(("typed", "card"), [line.split(" = ") for line in NAMES.read_text(encoding="utf-8").splitlines()])
def test_the_names_people_use(typed: str, card: str) -> None:
    """What nvidia-smi prints and what people type lead to the same card."""
    assert gpu_named(typed).name == card


@each_card
def test_every_figure_is_plausible_and_says_where_it_comes_from(gpu: Gpu) -> None:
    """vLLM sees 0.90 to 1.0 of the size on the box, but of Strix Halo's what its firmware grants; rates fit the hardware."""
    if gpu.name != "Radeon 8060S":
        for size_bytes in (gpu.total_low_bytes, gpu.total_bytes, gpu.total_high_bytes):
            assert 0.90 <= size_bytes / (gpu.box_gb * GIB) <= 1.0
        assert gpu.total_high_bytes / gpu.total_low_bytes < 1.08  # ECC on GDDR6 is the widest: a sixteenth
    if gpu.memory_is_measured:
        assert gpu.memory_starts >= 1
        assert re.search(r"\bid \d+|#\d+|row", gpu.memory_evidence)
    else:
        assert gpu.memory_evidence.startswith("estimated: ")
        assert gpu.total_low_bytes < gpu.total_high_bytes
    assert (gpu.compute_capability is None) == (gpu.vendor is Vendor.AMD)
    capability = gpu.compute_capability or (9, 0)
    if capability < (8, 9) or gpu.arch == "gfx90a":
        assert gpu.fp8_flops is None
    if capability < (8, 0):
        assert gpu.bf16_flops is None
        assert "no bf16" in gpu.note
    if gpu.bf16_flops and gpu.fp8_flops:
        assert gpu.fp8_flops / gpu.bf16_flops == pytest.approx(2.0, rel=0.02)  # a sparse figure in one of them would be 4 or 1
    assert gpu.sources
    assert gpu.bandwidth_bytes_per_s is not None or gpu.name == "RTX 4090 48GB"
    assert 100e9 <= (gpu.bandwidth_bytes_per_s or 1e12) <= 10e12
    assert gpu.unified_memory == (gpu.name.startswith(("GH200", "GB", "Jetson", "Radeon 8060S")))


@each("unclear", AMBIGUOUS, ids=lambda unclear: unclear.names[0])
def test_every_ambiguous_name_offers_cards_we_know(unclear: Ambiguous) -> None:
    """What we offer instead of a guess can be typed back."""
    for spelling in unclear.names:
        with pytest.raises(BadInput) as refused:
            gpu_named(spelling)
        assert all(card in str(refused.value) for card in unclear.candidates)
    assert all(gpu_named(card).name == card for card in unclear.candidates)


SLICE = r"MIG slice of H100 SXM 80GB, .* size of the slice in GiB$"
NONE = "no GPU called .* is known"
SEVERAL = r"is 8 cards: say --gpu H100; .* \(-tp 8\)"


@each(("typed", "says"), [*cases("hardware", "what_is_no_card_is_one_line"), ("gpu" * 200, NONE)])
def test_what_is_no_card_is_one_line(typed: str, says: str) -> None:
    """Two sizes under one name, a slice, several cards, a name that is only near, nonsense: each says what to type instead."""
    with pytest.raises(BadInput, match=says) as refused:
        gpu_named(typed)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


def test_cards_of_the_public_starts_are_known_with_totals_within_half_a_percent() -> None:
    """Each card of the table of starts resolves, or is listed with the reason why not; vLLM printed what we say it sees."""
    checked = 0
    for row in starts():
        for name in card_names_in(str(row["gpu"])):
            if name in NOT_OURS:
                continue
            assert candidates_for(name), name
            for gpu in candidates_for(name) if row["gpu_total_gib"] is not None and name not in NOT_FOLLOWED else ():
                assert gpu.total_bytes / GIB == pytest.approx(row["gpu_total_gib"], rel=0.005), (row["id"], gpu.name)
                checked += 1
    assert checked >= 40


def test_the_page_is_in_step_with_the_table() -> None:
    """docs/gpus.md is what the table prints; `python -m lab.write_gpu_docs` brings it up to date."""
    assert write_gpu_docs.PAGE.read_text(encoding="utf-8") == write_gpu_docs.page()
