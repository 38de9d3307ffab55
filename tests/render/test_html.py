"""The page: well formed, self-contained, and safe whatever a model is called."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.findings import Code, Finding, Severity
from plimsoll.plan.findings import Advice
from plimsoll.plan.ledger import plan_ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.workload import Matrix, MatrixSpec, Workload, WorkloadAnswer, judge, plan_matrix, pool_of
from plimsoll.render.html import plan_page
from plimsoll.units import GIB
from tests.each import sure
from tests.render.html_page import HtmlPage
from tests.render.test_plan import LLAMA, SECRET, planned

HOSTILE = "\"><script>alert('x')</script><img src=//evil.example/x onerror=alert(1)>"


def _planned(model: str = "meta-llama/Llama-3.1-8B", gib: int = 79, *flags: str, notes: tuple[str, ...] = ()) -> MemoryPlan:
    finding = Finding(Code.STARTUP_CONTEXT_TOO_LONG, Severity.CRITICAL, 0.9, f"title {model}", f"because {model}")
    advice = Advice("--max-model-len", "1024", f"why {model}", f"effect {model}", Code.STARTUP_CONTEXT_TOO_LONG)
    return replace(planned(*flags, model=model, gib=gib, used=GIB), findings=[finding], advice=[advice], notes=notes)


def _more(plan: MemoryPlan) -> tuple[Matrix, WorkloadAnswer]:
    spec = MatrixSpec.parse("context=8k,32k,128k,200k concurrency=1..2048")
    ledger = plan.ledger
    matrix = plan_matrix(spec, ledger.settings, lambda s: plan_ledger(LLAMA, s, ledger.card), longest=131072)
    return matrix, judge(Workload(((1200, 300),), 64), pool_of(ledger, LLAMA))


def _whole(plan: MemoryPlan) -> HtmlPage:
    matrix, workload = _more(plan)
    page = plan_page(plan, matrix=matrix, workload=workload)
    _check_alone(page)
    return HtmlPage(page)


def _check_alone(page: str) -> None:
    """Nothing that a browser would load or run."""
    parsed = HtmlPage(page)
    allowed = {
        "html", "head", "meta", "title", "style", "body", "main", "footer", "h1", "h2", "p", "pre", "span", "svg", "desc",
        "text", "rect", "line", "path", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li", "code",
        "strong", "br",
    }  # fmt: skip
    assert {tag for tag, _ in parsed.elements} <= allowed
    for _, attributes in parsed.elements:
        assert not {name for name in attributes if name in ("src", "href", "style") or name.startswith(("on", "xlink"))}
    assert not re.search(r"url\(|@import|https?:|//", page[page.index("<style>") : page.index("</style>")])
    policy = sure(next(a["content"] for a in parsed.tags("meta") if a.get("http-equiv") == "Content-Security-Policy"))
    assert policy.startswith("default-src 'none'")


def test_the_page_has_all_parts_and_a_grid_that_needs_no_colour() -> None:
    """Every term, the cache, the finding, the advice, the workload; every cell of the heat map has its class and its word."""
    page = _whole(_planned(notes=("a note",)))
    for part in ("weights", "non-torch", "activation", "graphs", "KV cache", "slack", "startup.context-too-long",
                 "--max-model-len 1024", "a note", "64 at once", "16 (in force)",
                 "vllm serve meta-llama/Llama-3.1-8B"):  # fmt: skip
        assert part in page.text, part
    text = plan_page(_planned(), matrix=_more(_planned())[0])
    cells = re.findall(r'<td class="(fits|preemption-risk|does-not-fit) u[0-4]" title="[^"]+">([^<]+)</td>', text)
    assert len(cells) == 4 * 12
    words = {"fits": "fits", "preemption-risk": "risk", "does-not-fit": "no"}
    assert all(word.startswith(words[state]) for state, word in cells)
    assert {state for state, _ in cells} == set(words)


def test_screen_readers_and_keyboards_get_along() -> None:
    """A language, one first heading, a named picture, headed tables, regions that take the focus, no id twice."""
    page = _whole(_planned())
    assert page.tags("html") == [{"lang": "en"}]
    assert len(page.tags("h1")) == 1
    (svg,) = page.tags("svg")
    assert (svg["aria-label"] or "").startswith("The card drawn to scale. ")
    assert len(page.tags("table")) == len(page.tags("caption")) == sum(a.get("tabindex") == "0" for a in page.tags("div"))
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.tags("th"))


def test_the_bar_is_to_scale() -> None:
    """The boxes of the card lie side by side and are as wide as their share of it."""
    plan = _planned()
    rects = [a for a in _whole(plan).tags("rect") if a.get("y") == "8" and a.get("class") != "edge"]
    frame = next(a for a in _whole(plan).tags("rect") if a.get("class") == "edge")
    scale = float(frame["width"] or 0) / plan.ledger.card.total_bytes
    sizes = [GIB, plan.ledger.context.value, plan.ledger.weights.value, plan.ledger.non_torch.value]
    sizes += [plan.ledger.activation.value, plan.ledger.graphs.value, plan.ledger.kv.value, plan.ledger.slack.value]
    at = float(frame["x"] or 0)
    for rect, size in zip(rects, sizes, strict=True):
        assert float(rect["width"] or 0) == pytest.approx(size * scale, abs=0.25)
        assert float(rect["x"] or 0) == pytest.approx(at, abs=0.25)
        at += size * scale


@pytest.mark.parametrize("gib", [4, 16, 17, 20])
def test_a_card_too_small(gib: int) -> None:
    """What is missing is framed, and every box stays inside the picture."""
    plan = _planned("m", gib)
    page = _whole(plan)
    assert (plan.ledger.kv.value < 0) == any(a.get("class") == "missing" for a in page.tags("rect"))
    for rect in page.tags("rect"):
        assert float(rect["width"] or 0) >= 0
        assert 130 <= float(rect["x"] or 0) <= float(rect["x"] or 0) + float(rect["width"] or 0) <= 1000


@pytest.mark.parametrize(
    "name", [HOSTILE, "a'b\"c&amp;<b>", "</title></style></svg><script>x</script>", "\u202eevil\x1b[31m\x00"]
)
def test_a_hostile_model_is_text(name: str) -> None:
    """A model named like markup adds no element and no attribute, wherever the name is shown."""
    harmless, hostile = _whole(_planned("m", notes=("n",))), _whole(_planned(name, notes=(f"see {name}",)))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(a) for _, a in hostile.elements] == [sorted(a) for _, a in harmless.elements]
    assert "\x1b" not in hostile.text
    assert "\u202e" not in hostile.text


def test_hostile_and_secret_words_stay_where_they_are() -> None:
    """A quoted reason closes neither its attribute nor its element; a token is not on the page."""
    matrix = _more(_planned())[0]
    rows = tuple(tuple(cell._replace(why=HOSTILE, starts=False) for cell in row) for row in matrix.rows)
    page = plan_page(_planned(), matrix=matrix._replace(rows=rows))
    _check_alone(page)
    assert [a["title"] for a in HtmlPage(page).tags("td") if "title" in a] == [HOSTILE] * 48
    page = plan_page(_planned(f"org/{SECRET}", 79, "--api-key", "s3cret-value-of-mine", notes=(f"HF_TOKEN={SECRET}",)))
    assert SECRET not in page
    assert "s3cret-value-of-mine" not in page
    assert "[redacted]" in page


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_name_makes_a_sound_page(name: str) -> None:
    """Whatever the model is called, the page is well formed and stands alone."""
    _check_alone(plan_page(replace(_planned(), model=name, notes=[name])))
