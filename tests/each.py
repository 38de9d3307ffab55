"""Many values in one test, where they stand and how many of them are tried; a test in an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hypothesis import strategies as st

SOAK = bool(os.environ.get("PLIMSOLL_SOAK"))  # `make soak`: all of what `make test` tries a few of

Test = Callable[..., None]
T = TypeVar("T")


def each(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[], Iterable[Any]], ids: Callable[[Any], str] = repr
) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but one test: it goes through all of them, and names those that fail.

    Values that take long to make are given as a function, so that collecting the test does not wait for them.
    """
    wanted = (names,) if isinstance(names, str) else names
    is_made = callable(values) and not isinstance(values, type)  # an enum can be called, and is a list of its members
    known: Any = values if is_made else list(values)  # type: ignore[arg-type]

    def decorate(test: Test) -> Test:
        def run(**others: Any) -> None:
            kept = list(known() if is_made else known)
            assert kept, f"there is no {' and '.join(wanted)} to try"
            wrong = []
            for value in kept:
                given = {wanted[0]: value} if isinstance(names, str) else dict(zip(wanted, value, strict=True))
                try:
                    test(**given, **others)
                except Exception as error:
                    wrong.append((ids(value), error))
            if wrong:
                first = wrong[0][1]
                listed = "\n".join(f"{name}: {type(error).__name__}: {error}" for name, error in wrong[:20])
                raise AssertionError(f"{len(wrong)} of {len(kept)} fail:\n{listed}") from first

        signature = inspect.signature(test)
        left = [value for name, value in signature.parameters.items() if name not in wanted]
        assert len(left) + len(wanted) == len(signature.parameters), f"{test.__name__} does not take {wanted}"
        run.__name__, run.__qualname__, run.__doc__, run.__module__ = (
            test.__name__, test.__qualname__, test.__doc__, test.__module__,
        )  # fmt: skip
        run.__dict__.update(test.__dict__)
        run.__dict__["__signature__"] = signature.replace(parameters=left)
        return run

    return decorate


def rows(path: Path, section: str = "") -> list[tuple[str, ...]]:
    """The rows under a heading (`== NAME`) of a file, or of all of it; places are parted by ` => `, `#` begins a comment."""
    found, is_here = [], not section
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            is_here = line == f"== {section}"
        elif is_here and line.strip() and not line.startswith("#"):
            found.append(tuple(re.split(r" =>(?: |$)", line)))
    return found


@functools.cache
def _tables(folder: str) -> dict[str, list[Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, list[Any]] = yaml.load((Path(__file__).parent / folder / "cases.yaml").read_bytes(), Loader=loader)
    return loaded


def cases(folder: str, name: str) -> list[Any]:
    """The rows of a test in the cases.yaml of its folder. A list is a tuple, except in an object."""

    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else value

    return [read(row) for row in _tables(folder)[name]]


def trees(keys: Iterable[str] = (), most: int = 10, words: Iterable[str] = ("8",)) -> st.SearchStrategy[Any]:
    """Whatever JSON can hold, in objects with these keys, or any; some texts are of these words."""
    named = st.sampled_from(list(keys)) if keys else st.text(max_size=5)
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(list(words))
    return st.recursive(leaf, lambda one: st.lists(one, max_size=4) | st.dictionaries(named, one, max_size=4), max_leaves=most)


def sure(value: T | None) -> T:
    """What must be there."""
    assert value is not None
    return value


def times(few: int, many: int) -> int:
    """How often something random is tried: `few` in `make test`, `many` in `make soak`."""
    return many if SOAK else few


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Test:
    """An asynchronous test in an event loop of its own, for a minute at most."""

    @functools.wraps(test)
    def run(*values: Any, **others: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*values, **others), 60))

    return run
