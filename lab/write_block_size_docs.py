"""What a block size costs and buys on real traffic: the table in docs/simulate.md and its picture.

    python -m lab.write_block_size_docs --traces DIR            write both
    python -m lab.write_block_size_docs --traces DIR --check    exit 1 if they are not what the replay says now

DIR holds the public traces under the names below. Each is replayed at every block size on the same memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lab import marked
from plimsoll.cli.main import parse
from plimsoll.cli.simulate import BLOCK_SIZES
from plimsoll.simulate.inputs import read_inputs
from plimsoll.simulate.options import ReplayOptions
from plimsoll.simulate.replay import AtBlockSize, replay
from plimsoll.simulate.summary import at_block_sizes, summarise
from plimsoll.simulate.traffic import SCHEME

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "simulate.md"
PICTURE = DOCS / "images" / "block-sizes.svg"
BEGIN, END = "<!-- block sizes -->", "<!-- end of block sizes -->"
_LONG = "--max-model-len {} --max-num-batched-tokens 8192 --ctx-ps 5000"


class Workload(NamedTuple):
    """One trace and the cache it runs in, as words of the command line: the page shows what was run."""

    title: str
    trace: str
    options: str

    @property
    def is_made_up(self) -> bool:
        """Whether it can be run without any file."""
        return self.trace.startswith(SCHEME)

    @property
    def command(self) -> str:
        """What a reader types."""
        return f"plimsoll simulate {self.trace} {self.options}"


class Measured(NamedTuple):
    """What the replay said of a workload."""

    workload: Workload
    requests: int
    cache_tokens: int
    mean_use: float
    """Share of the cache, at the block size of the command."""
    rows: Sequence[AtBlockSize]
    has_contents: bool
    """Whether the trace says which requests begin alike; without that there is nothing to hit."""


class Measure(NamedTuple):
    """One of the things that a block size changes."""

    title: str
    explained: str
    colour: str

    @property
    def is_percent(self) -> bool:
        """Whether it is a share, not a count."""
        return self.title.endswith("%")


WORKLOADS = (
    Workload("Azure conversations", "AzureLLMInferenceTrace_conv.csv.gz", "--num-blocks 1025"),
    Workload("Azure code", "AzureLLMInferenceTrace_code.csv.gz", "--num-blocks 1025"),
    Workload("ShareGPT, 300 chats", "sharegpt_300_hashed.jsonl.gz", "--trace-block-size 16 --num-blocks 2588"),
    Workload("arXiv summaries", "vidur_arxiv_summarization_lengths.csv.gz", "--rate 4 --limit 10000 --num-blocks 2049"),
    Workload("Mooncake arXiv", "mooncake_arxiv_first1000.jsonl.gz", f"--num-blocks 32769 {_LONG.format(131072)}"),
    Workload("Mooncake chats", "mooncake_conversation_trace.jsonl.gz", f"--num-blocks 32769 {_LONG.format(131072)}"),
    Workload("Mooncake synthetic", "mooncake_synthetic_trace.jsonl.gz", f"--num-blocks 32769 {_LONG.format(196608)}"),
    Workload(
        "system prompts",
        "synthetic:requests=10000,rate=10,prompt=600,output=200,families=16,family_tokens=500,block=4",
        "--num-blocks 2049",
    ),
)
MEASURES = (
    Measure("empty slots, %", "of the slots in used blocks, those without a token", "waste"),
    Measure("prefix hits, %", "of the prompt tokens, those found in the prefix cache at first admission", "hits"),
    Measure("table entries", "blocks in the tables of running requests, on average over busy time", "entries"),
    Measure("preemptions", "how often a request had to give its blocks back", "preempted"),
)


def measure(workload: Workload, traces: Path) -> Measured:
    """Replay it at every block size."""
    path = workload.trace if workload.is_made_up else str(traces / workload.trace)
    given = read_inputs(parse(ReplayOptions, [*workload.options.split(), path]))
    rows = at_block_sizes(given.trace, given.settings, given.step_time, BLOCK_SIZES)
    use = summarise(replay(given.trace, given.settings, given.step_time)).kv_usage.mean
    assert use is not None, "these traces keep an engine busy"
    tokens = (given.settings.num_blocks - 1) * given.settings.block_size
    return Measured(workload, given.trace.size, tokens, use, rows, len(given.trace.prefix_ids) > 0)


def figures(row: AtBlockSize) -> tuple[float, float, float, float]:
    """In the order of MEASURES."""
    assert row.waste_percent is not None, "one group has one block size"
    return row.waste_percent, 100 * row.hit_rate, row.table_entries_mean, float(row.preemptions)


def short(value: float, kind: Measure) -> str:
    """As much of it as fits above a bar: 0.05, 1.3, 38, 1.3k."""
    if kind.is_percent and value < 9.95:
        return f"{value:.2f}" if value < 0.995 else f"{value:.1f}"
    if value < 999.5:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 9_950 else f"{value / 1000:.0f}k"


def section(found: Sequence[Measured]) -> str:
    """What stands between the two marks of the page."""
    lines = ["| traffic | requests | cache, tokens | mean use at 16 | command |", "|---|---:|---:|---:|---|"]
    for one in found:
        cells = f"{one.requests:,} | {one.cache_tokens:,} | {100 * one.mean_use:.0f} %"
        lines.append(f"| {one.workload.title} | {cells} | `{one.workload.command}` |")
    lines += ["", "![Empty slots, prefix hits, table entries and preemptions by block size](images/block-sizes.svg)", ""]
    lines += [f"| traffic | tokens a block | {' | '.join(map(str, BLOCK_SIZES))} |", f"|---|---|{'---:|' * len(BLOCK_SIZES)}"]
    for one in found:
        for place, kind in enumerate(MEASURES):
            cells = " | ".join(_exact(one, figures(row)[place], kind) for row in one.rows)
            lines.append(f"| {'' if place else one.workload.title} | {kind.title} | {cells} |")
    return "\n".join(lines)


def _exact(one: Measured, value: float, kind: Measure) -> str:
    if kind.colour == "hits" and not one.has_contents:
        return "-"
    return f"{value:.2f}" if kind.is_percent else f"{value:,.0f}"


_STYLE = """<style>
.back{fill:#fff}text{fill:#1b1f24;font:14px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.head{font-weight:600}.dim{fill:#59636e;font-size:12px}.axis{stroke:#c4ccd4}
.waste{fill:#2f6fd0}.hits{fill:#1a8a63}.entries{fill:#7a4fc4}.preempted{fill:#c8372d}
@media (prefers-color-scheme:dark){.back{fill:#0f1318}text{fill:#e7ecf2}.dim{fill:#9aa5b1}.axis{stroke:#39424d}
.waste{fill:#6ea8fe}.hits{fill:#4cc79b}.entries{fill:#b191f5}.preempted{fill:#ff7b72}}
</style>"""
_WIDTH, _LEFT, _PANEL, _GAP = 1000, 196, 182, 19
_TOP, _ROW, _BARS = 74, 108, 54


def drawn(found: Sequence[Measured]) -> str:
    """A row for each workload, a small chart for each measure; it brings its own ground, so it reads on any page."""
    height = _TOP + _ROW * len(found)
    inner = [_STYLE, f'<rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>']
    for place, kind in enumerate(MEASURES):
        x = _LEFT + place * (_PANEL + _GAP)
        inner.append(f'<text class="head" x="{x}" y="30">{kind.title}</text>')
        inner.append(f'<text class="dim" x="{x}" y="48">by tokens a block</text>')
    for line, one in enumerate(found):
        floor = _TOP + line * _ROW + 22 + _BARS
        inner.append(f'<text class="head" x="20" y="{floor - 22}">{one.workload.title}</text>')
        inner.append(f'<text class="dim" x="20" y="{floor - 4}">{one.cache_tokens:,} tokens of cache</text>')
        for place, kind in enumerate(MEASURES):
            left = _LEFT + place * (_PANEL + _GAP)
            if kind.colour == "hits" and not one.has_contents:
                inner.append(f'<text class="dim" x="{left}" y="{floor - 4}">lengths only: nothing to hit</text>')
            else:
                inner += _bars([figures(row)[place] for row in one.rows], kind, left, floor)
    title = "What the block size changes, on the same memory"
    says = "; ".join(f"{kind.title}: {kind.explained}" for kind in MEASURES)
    size = f' xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="sizes-title sizes-says"{size}>',
        f'<title id="sizes-title">{title}</title>',
        f'<desc id="sizes-says">{says}. Each chart has its own scale, from 0.</desc>',
        *inner,
        "</svg>\n",
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def _bars(values: Sequence[float], kind: Measure, left: int, floor: int) -> list[str]:
    """One bar a block size, with its value above and its size below; the scale starts at 0 and is this chart's own."""
    most, step = max(values), _PANEL / len(values)
    lines = []
    for place, (size, value) in enumerate(zip(BLOCK_SIZES, values, strict=True)):
        middle, high = _number(left + (place + 0.5) * step), _BARS * value / most if most else 0.0
        x, y = _number(left + (place + 0.5) * step - step * 0.3), _number(floor - high)
        lines.append(f'<rect class="{kind.colour}" x="{x}" y="{y}" width="{_number(step * 0.6)}" height="{_number(high)}"/>')
        label = f'y="{_number(floor - high - 5)}" text-anchor="middle">{short(value, kind)}'
        lines.append(f'<text class="dim" x="{middle}" {label}</text>')
        lines.append(f'<text class="dim" x="{middle}" y="{floor + 16}" text-anchor="middle">{size}</text>')
    return [*lines, f'<path class="axis" d="M{left} {floor}h{_PANEL}"/>']


def placed(page: str, made: str) -> str:
    """The page with this section between its marks."""
    return marked.placed(page, BEGIN, END, f"\n\n{made}\n\n", PAGE)


def main(words: Sequence[str]) -> int:
    """Write both, or say whether they are in step."""
    parser = argparse.ArgumentParser(prog="python -m lab.write_block_size_docs")
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the public traces")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(words)
    found = []
    for workload in WORKLOADS:
        print(workload.title, file=sys.stderr, flush=True)
        found.append(measure(workload, given.traces))
    page = PAGE.read_text(encoding="utf-8")
    made = {PAGE: placed(page, section(found)), PICTURE: drawn(found)}
    old = [path for path, content in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != content]
    for path in old:
        if given.check:
            print(f"{path.relative_to(DOCS.parent)} is not what the replay says")
        else:
            path.write_text(made[path], encoding="utf-8")
    return 1 if given.check and old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
