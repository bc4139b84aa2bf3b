"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

from fparallel import optim

MODULES = [f"fparallel.optim.{module.name}" for module in pkgutil.iter_modules(optim.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_every_public_function_has_an_example():
    finder = doctest.DocTestFinder(recurse=False)
    public = {name: getattr(optim, name) for name in optim.__all__}
    functions = {name: f for name, f in public.items() if callable(f) and not isinstance(f, type)}
    without = [name for name, f in functions.items() if not any(t.examples for t in finder.find(f, name))]
    assert [name for name in without if name not in ("ScalarOrSchedule", "Schedule")] == []
