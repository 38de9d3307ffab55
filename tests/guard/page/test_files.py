"""The files of the page: nothing in them can turn a text into markup, and nothing asks another host."""

from __future__ import annotations

import re

from plimsoll.guard.page.page import page_files

FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|createContextualFragment|"
    r"setTimeout\(\s*[\"'`]|\.href\s*=|javascript:|document\.cookie|localStorage|dangerously"
)


def test_every_file_is_there_with_its_kind() -> None:
    """The page, its script and its style, and each that these name."""
    found = page_files()
    assert found["/"][1].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(/page/[^"]+)"', found["/"][0].decode()))
    scripts = "".join(body.decode() for path, (body, _) in found.items() if path.endswith(".js"))
    named |= {f"/page/{name}" for name in re.findall(r'from "\./([a-z]+\.js)"', scripts)}
    assert named <= found.keys()
    assert {"/page/app.js", "/page/style.css", "/page/icon.svg"} <= named


def test_no_text_becomes_markup() -> None:
    """None of the ways from a text to markup or code, no cookie and nothing that outlives the tab."""
    for path, (body, _) in page_files().items():
        found = FORBIDDEN.search(body.decode())
        assert found is None, f"{path}: {found.group() if found else ''}"


def test_nothing_names_another_host_or_stands_in_the_markup() -> None:
    """No address of elsewhere; no script, style or handler in the markup itself: the policy would refuse it."""
    for path, (body, _) in page_files().items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path
    page = page_files()["/"][0].decode()
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*src=)", page)
