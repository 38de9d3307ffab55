"""Compiled parts as plain Python: they cannot be called from Python themselves."""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace


def as_written(module: ModuleType) -> SimpleNamespace:
    """The module's functions as they were written, calling each other."""
    names = dict(vars(module))
    for name, value in vars(module).items():
        function = getattr(value, "py_func", value)
        if not isinstance(function, FunctionType):
            continue
        names[name] = function
        if function.__module__ == module.__name__:
            names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
    return SimpleNamespace(**names)
