"""Annotations that are strings: forward references, ``from __future__``, classes in functions."""

from __future__ import annotations

import gc
import weakref
from typing import Annotated, Any, Generic, TypeVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import fparallel.tree as tree
from fparallel.errors import TreeError
from fparallel.tree import dataclass, static


@dataclass
class Model:
    blocks: Annotated[list[Block], "layers"]  # defined below
    head: "Float[Tensor, 'embed vocab']"  # a string in a string
    name: NoSuchType = static(default="m")  # a static field is not read


@dataclass
class Block:
    w: Float[Tensor, "embed mlp"]
    inner: Block | None = None  # itself


def axes(value):
    paths, _, _ = tree.flatten_with_path(value)
    return {p: None if s is None else str(s) for p, s in zip(paths, tree.logical_specs(value), strict=True)}


def test_a_class_defined_later_and_the_class_itself():
    w = torch.empty(2, 2)
    assert axes(Model([Block(w, Block(w))], w)) == {
        "blocks.0.w": "embed mlp of layers 0/1",
        "blocks.0.inner.w": "embed mlp of layers 0/1",
        "head": "embed vocab",
    }


def make(names):
    Weight = Float[Tensor, names]
    T = TypeVar("T")

    @dataclass
    class Outer(Generic[T]):
        inner: Inner  # defined later in this function
        weight: Weight
        more: T

    @dataclass
    class Inner:
        more: list[Weight]

    @dataclass
    class Whole:
        outer: Outer[Weight]

    return Whole(Outer(Inner([1]), 2, 3))


def test_classes_in_a_function_that_has_returned():
    first, second = make("a b"), make("c d")
    assert set(axes(second).values()) == {"c d"}
    assert set(axes(first).values()) == {"a b"}
    assert len(axes(first)) == 3


def test_classes_in_the_body_of_a_class():
    local = Float[Tensor, "a"]

    class Scope:
        Weight = Float[Tensor, "b"]

        @dataclass
        class Node:
            x: local
            y: Weight
            z: Later

        Later = Float[Tensor, "c"]

    assert list(axes(Scope.Node(1, 2, 3)).values()) == ["a", "b", "c"]


def test_a_base_in_another_scope():
    def base():
        Weight = Float[Tensor, "a"]

        @dataclass
        class Base:
            x: Weight
            later: Later

        Later = Float[Tensor, "later"]
        return Base

    Base = base()

    @dataclass
    class Child(Base):
        y: Float[Tensor, "b"]

    assert axes(Child(1, 2, 3)) == {"x": "a", "later": "later", "y": "b"}


def test_a_name_bound_later_is_tried_again():
    @dataclass
    class Early:
        x: Late

    with pytest.raises(TreeError, match=r"Early.x, 'Late', cannot be resolved"):
        tree.flatten(Early(1))
    Late = Float[Tensor, "late"]
    assert axes(Early(1)) == {"x": "late"}
    del Late


def test_the_decorator_with_options_sees_the_same_names():
    Weight = Float[Tensor, "a"]

    @dataclass(kw_only=True)
    class Node:
        x: Weight

    assert axes(Node(x=1)) == {"x": "a"}


class Big:
    pass


def test_the_frame_of_a_resolved_class_is_let_go():
    def define():
        big = Big()

        @dataclass
        class Node:
            x: Later

        Later = Any
        return Node, weakref.ref(big)

    Node, big = define()
    gc.collect()
    assert big() is not None  # what `Later` is cannot be known yet
    tree.flatten(Node(1))
    gc.collect()
    assert big() is None
