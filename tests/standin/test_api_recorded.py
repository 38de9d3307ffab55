"""The stand-in's answers beside those that were recorded of a real vLLM 0.32.0: no difference without a reason.

The same questions go to the real engine itself in tests/real/test_standin_conformance.py, with drains, signals and deaths.
"""

from __future__ import annotations

import json
from dataclasses import replace

from lab.conformance.__main__ import CAPTURES
from lab.conformance.cases import API_KEY, KEYED, REQUESTS
from lab.conformance.compare import beyond, differences
from lab.conformance.phases import answers, tidied
from plimsoll.simulate.settings import EngineLimits
from plimsoll.standin.config import ServerFlags
from plimsoll.standin.engine import StandinEngine
from tests.fakes import TOKEN
from tests.standin.engines import SIZES, config
from tests.standin.servers import FAST, standin


def test_every_answer_is_the_real_ones() -> None:
    """Statuses, headers, bodies, the events of streams: with development mode, and with a key."""
    real = json.loads((CAPTURES / "real.json").read_text(encoding="utf-8"))
    settings = EngineLimits(num_blocks=2000, block_size=128, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048)
    tiny = replace(config(settings, FAST, SIZES._replace(vocab=2048)), model="tiny", served_names=("tiny",))
    for part, options, cases in (
        ("main", ServerFlags(is_dev_mode=True, has_sleep_mode=False, token=TOKEN), REQUESTS),
        ("keyed", ServerFlags(api_keys=(API_KEY,)), KEYED),
    ):
        with standin(options, one=StandinEngine(tiny)) as server:
            ours = {part: {"requests": tidied(answers(server, cases))}}  # type: ignore[arg-type]
        left = beyond(differences({part: {"requests": real[part]["requests"]}}, ours))
        assert not left, "\n".join(map(str, left))
