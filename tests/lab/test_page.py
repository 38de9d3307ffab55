"""A page read as a script: its commands, and whether what it shows is what was printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.page import ANY, CUT, Command, PageError, Told, commands_of, renewed, rewritten, same, swapper, told_of, wrong

PAGE = """\
# A page

Words with `$ not a command` in them.

```toml
$ = "nor is this"
```

<!-- run: exit 1, numbers within 20 %, within 90 s -->
```console
$ one --flag \\
    more
a 10
$ cat > file <<'EOF'
$ is not a command here
EOF
$ three
b
c
```

Other words.

```console
$ four     # with a remark
```
"""


def command(shown: str, above: str = "") -> Command:
    """The one command of a page that shows this, from its third line on."""
    (found,) = commands_of(f"{above}\n```console\n$ it\n{shown}```\n")
    return found


def test_commands_are_found_with_what_they_print_and_what_is_said_above_them() -> None:
    """In order, over several lines where a shell would go on, and only in console blocks."""
    one, two, three, four = commands_of(PAGE)
    assert (one.line, one.text, one.shown, one.shown_line) == (11, "one --flag \\\n    more", ("a 10",), 13)
    assert two.text == "cat > file <<'EOF'\n$ is not a command here\nEOF"
    assert (two.line, two.shown) == (14, ())
    assert (three.text, three.shown) == ("three", ("b", "c"))
    assert {(each.above.exit_code, each.above.limit_s, each.above.by_words) for each in (one, two, three)} == {(1, 90.0, True)}
    assert (four.bare, one.bare) == ("four", one.text)
    assert (four.text, four.shown, four.above.exit_code, four.above.rules) == ("four     # with a remark", (), 0, ())


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("\n```console\noutput without a command\n```\n", "3:"),
        ("<!-- run: numbers may be anything -->\n```console\n$ x\n```\n", "1:"),
        ("\n\n<!-- the page: weather fine -->\n", "3:"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(page: str, line: str) -> None:
    """A page with a mistake in it is not taken for one without commands."""
    with pytest.raises(PageError, match=line):
        (commands_of(page), told_of(page))


def test_what_is_shown_must_be_printed_to_the_letter() -> None:
    """The line that is not so is named, and so is what was printed in its place; lines too few or too many are not fine."""
    assert wrong(command("a 1\nb\n"), "a 1\nb\n") is None
    assert wrong(command(""), "") is None
    assert wrong(command("a 1\nb\n"), "a 2\nb\n") == (4, "shown is 'a 1', printed was 'a 2'")
    assert wrong(command("a\nb\n"), "a\n") == (5, "shown is 'b', nothing more was printed")
    assert wrong(command("a\n"), "a\nb\n") == (4, "more was printed than is shown: 'b'")
    assert wrong(command(""), "a\n") == (3, "more was printed than is shown: 'a'")
    assert wrong(command("a  b\n"), "a b\n") is not None


def test_a_cut_stands_for_any_lines_and_for_nothing_else() -> None:
    """At the beginning, amid and at the end; what stands around it must be there, in its order."""
    cut = command(f"a\n{CUT}\nd\n")
    assert [wrong(cut, printed) is None for printed in ("a\nd\n", "a\nb\nc\nd\n", "a\nd\ne\n", "b\nd\n", "a\n")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert wrong(cut, "a\nb\n") == (6, "not printed: 'd'")
    ends = command(f"{CUT}\nb\nc\n{CUT}\nf\n{CUT}\n")
    assert wrong(ends, "a\nb\nx\nb\nc\nd\nf\n") is None
    assert wrong(ends, "f\nb\nc\n") == (8, "not printed: 'f'")


def test_numbers_may_differ_only_where_it_is_said_and_as_far_as_it_is_said() -> None:
    """Words, versions and addresses never may; dates and clocks may wherever numbers may."""
    close = command("2026-01-02 03:04:05 took 10.0 s,\nKV 1,000 of vLLM 0.32.0\n", "<!-- run: numbers within 20 % -->")
    assert wrong(close, "2027-11-12 13:14:15 took 11.9 s, KV\n801 of vLLM 0.32.0\n") is None
    far, newer = "took 12.6 s, KV 801 of vLLM 0.32.0\n", "took 10 s, KV 801 of vLLM 0.32.1\n"
    assert wrong(close, "2027-11-12 13:14:15 " + far) == (4, "shown is '10.0', printed was '12.6'")
    assert wrong(close, "2027-11-12 13:14:15 " + newer) == (5, "shown is '0.32.0', printed was '0.32.1'")
    assert wrong(close, "2027-11-12 13:14:15 takes 10 s, KV\n801 of vLLM 0.32.0\n") is not None
    free = command(f"pid 1 took {CUT} s\n", "<!-- run: numbers differ -->")
    assert wrong(free, "pid 4711 took about 3 s\n") is None
    assert wrong(free, "pid x took about 3 s\n") is not None
    one = command("took 1 ms\nsaw 1\n", '<!-- run: numbers differ in "took" -->')
    assert wrong(one, "took  20 ms\nsaw 1\n") is None
    assert wrong(one, "took 20 ms\nsaw 2\n") == (5, "shown is 'saw 1', printed was 'saw 2'")


@given(st.text(), st.text())
def test_nothing_is_the_same_as_something_else(one: str, other: str) -> None:
    """Without leave to differ, two texts are the same only if they are."""
    assert same(one, other, 0.0) is (one == other)
    assert same(one, one, ANY)


def test_a_page_can_be_given_the_numbers_of_another_run() -> None:
    """With its cuts, in words as in lines; what was not as shown is replaced by all that was printed."""
    words = command(f"took 1 s, {CUT} of 10\n{CUT}\n  a     2.5 GiB\n", "<!-- run: numbers differ -->")
    assert (
        renewed(words, "took 20 s,\nthree or 4 of 100\nx\n  a    12.5 GiB\n")
        == f"took 20 s, {CUT} of 100\n{CUT}\n  a    12.5 GiB\n"
    )
    ends = command(f"a 1 {CUT}\nb\n", "<!-- run: numbers differ -->")
    assert renewed(ends, "a 2\nb\n") == f"a 2 {CUT}\nb\n"
    lines = command(f"a\ntook 1 s\n{CUT}\n", '<!-- run: numbers differ in "took" -->')
    assert renewed(lines, "a\ntook 21 s\nb\nc\n") == f"a\ntook 21 s\n{CUT}\n"
    assert renewed(lines, "b\ntook 21 s\n") == "b\ntook 21 s\n"
    assert renewed(command(""), "") == ""


def test_what_was_printed_takes_the_place_of_what_is_shown() -> None:
    """Only for the commands that are named; then the page is true."""
    made = rewritten(PAGE, {11: "a 11\na 12\n", 17: ""})
    one, two, three, _ = commands_of(made)
    assert (one.shown, two.shown, three.shown) == (("a 11", "a 12"), (), ())
    assert made.replace("a 11\na 12", "a 10").replace("$ three\n", "$ three\nb\nc\n") == PAGE


def test_a_readers_home_and_ports_stand_for_ours() -> None:
    """As whole words, both ways."""
    told = told_of("<!-- the page: home /home/you, checkout /home/you/plimsoll, ports 8000 9790 -->")
    assert told == Told("/home/you", "/home/you/plimsoll", (8000, 9790))
    to_us = swapper([(told.home, "/tmp/x"), (told.checkout, "/src"), ("8000", "4711")])
    assert to_us("cd /home/you/plimsoll/a; cd /home/you; cd /home/yours; :8000 18000 8000.") == (
        "cd /src/a; cd /tmp/x; cd /home/yours; :4711 18000 4711."
    )
    assert swapper([])("as it is") == "as it is"
