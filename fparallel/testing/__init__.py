"""Tests of parallel equality, for users as for the project itself.

`assert_equivalent` runs a step on one device and on a mesh and compares every leaf. The strategies draw
meshes, rules and whole training steps for hypothesis, which is imported when the first of them is used (it
comes with the extra `fparallel[test]`):

    @given(mesh=fp.testing.meshes(max_ranks=8, axes=("dp", "tp")), data=st.data())
    def test_my_step(mesh, data):
        rules = data.draw(fp.testing.rules_for(mesh, batch=("dp",), mlp=("tp", None), vocab=("tp", None)))
        fp.testing.assert_equivalent(train_step, (state, batch), mesh=mesh, rules=rules)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fparallel.testing.descriptions import Block, Case
from fparallel.testing.equivalence import (
    Difference,
    EquivalenceError,
    assert_close,
    assert_equivalent,
    differences,
)
from fparallel.testing.problems import Problem, build, check

if TYPE_CHECKING:
    from fparallel.testing.strategies import cases, meshes, models, pipelined_cases, rules_for, whole_cases

__all__ = [
    "Block",
    "Case",
    "Difference",
    "EquivalenceError",
    "Problem",
    "assert_close",
    "assert_equivalent",
    "build",
    "cases",
    "check",
    "differences",
    "meshes",
    "models",
    "pipelined_cases",
    "rules_for",
    "whole_cases",
]

_STRATEGIES = ("cases", "meshes", "models", "pipelined_cases", "rules_for", "whole_cases")


def __getattr__(name: str) -> Any:
    if name in _STRATEGIES:
        from fparallel.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
