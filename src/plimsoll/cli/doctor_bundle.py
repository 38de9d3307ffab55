"""`plimsoll doctor --bundle FILE`: one archive for a ticket, with secrets and users' text hidden."""

from __future__ import annotations

import time
from collections.abc import Iterator

import plimsoll
from plimsoll.cli.doctor_inputs import Given
from plimsoll.cli.options import Split
from plimsoll.doctor.diagnosis import Diagnosis
from plimsoll.domain.bundle import Part, TextFile
from plimsoll.domain.metrics_page import Page, escaped_label
from plimsoll.domain.units import format_count


def bundle(options: Split, given: Given, diagnosis: Diagnosis, as_text: str) -> str:
    """Write it; returns the sentence that says so."""
    from plimsoll.actuators.bundles import write_bundle

    left_out = [
        f"{source.rpartition('/')[2]}: a memory snapshot is never copied; what it shows is in doctor.json"
        for source, _ in given.snapshots
    ]
    written = write_bundle(
        options.values["--bundle"],
        _parts(given, diagnosis, as_text),
        made_with=f"plimsoll {plimsoll.__version__}",
        at=int(time.time()),
        force="--force" in options.switches,
        left_out=left_out,
    )
    return (
        f"Wrote {written.path}: {len(written.members)} files, {format_count(written.size_bytes)} bytes, "
        "secrets and users' text hidden. Look at its CONTENTS.txt before you send it."
    )


def _parts(given: Given, diagnosis: Diagnosis, as_text: str) -> Iterator[Part]:
    from plimsoll.report.doctor import as_json
    from plimsoll.sources.machine import collect_here

    yield Part("doctor.json", "json", "The findings and facts, schema plimsoll.doctor/1.", as_json(diagnosis).encode())
    yield Part("report.txt", "text", "The same as a person reads it.", as_text.encode())
    for log in given.logs:
        name = f"logs/{log.source.rpartition('/')[2] or 'log'}"
        yield Part(name, "text", "A log or other text that was given.", TextFile(given.paths[log.source]))
    for one in given.pages:
        yield Part(
            f"metrics/{_flat(one.source.rpartition('/')[2])}-1.txt",
            "text",
            "A page of metrics.",
            "\n".join(_page(one.first)).encode(),
        )
        if one.second is not None:
            yield Part(
                f"metrics/{_flat(one.source.rpartition('/')[2])}-2.txt",
                "text",
                "The same a few seconds later.",
                "\n".join(_page(one.second)).encode(),
            )
    yield from collect_here()


def _page(page: Page) -> Iterator[str]:
    """The samples as Prometheus writes them."""
    for samples in page.by_name.values():
        for one in samples:
            labels = ",".join(f'{name}="{escaped_label(value)}"' for name, value in one.labels.items())
            yield f"{one.name}{'{' + labels + '}' if labels else ''} {one.value:.17g}"


def _flat(source: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in source)[-80:] or "page"
