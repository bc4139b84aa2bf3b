"""Op rules, one module per family; importing the package registers them all."""

from fparallel.compiler.rules import (
    attention,
    batched,
    factories,
    indexing,
    matmul,
    parts,
    pointwise,
    reductions,
    views,
)
from fparallel.compiler.rules.registry import Placed, Rule, find_rule, has_rule, register_rule

__all__ = [
    "Placed",
    "Rule",
    "attention",
    "batched",
    "factories",
    "find_rule",
    "has_rule",
    "indexing",
    "matmul",
    "parts",
    "pointwise",
    "reductions",
    "register_rule",
    "views",
]
