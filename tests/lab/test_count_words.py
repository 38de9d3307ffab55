"""The counter of words: prose and tables, nothing that a program wrote."""

from __future__ import annotations

from lab import count_words

PAGE = """# One title

Two words, and [a link](somewhere/else.md) with `code in it`.

```console
$ not counted
```

<!-- keys: made by `python -m lab.write_guard_page` -->
| not | counted |
<!-- end of keys -->

| a | table |
"""


def test_what_programs_wrote_is_left_out() -> None:
    """Fenced blocks, generated parts and addresses do not count; a piece of code is one word."""
    assert count_words.words_of(PAGE) == 2 + 3 + 2 + 2 + 2


def test_an_end_that_is_missing_takes_the_rest_of_the_page() -> None:
    """A page that a script writes to its end has no mark there."""
    assert count_words.words_of("One.\n<!-- The list is printed by `python -m lab.x`; change it there -->\nnot counted") == 1
