"""Logical axes read from the annotations of registered classes.

The annotations here are real objects; ``test_deferred_annotations.py`` has the same as strings.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, Generic, NamedTuple, NewType, Optional, TypeVar, Union

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import fparallel.tree as tree
from fparallel.errors import TreeError
from fparallel.logical import VARIADIC
from fparallel.tree import dataclass, static

T = TypeVar("T")
U = TypeVar("U")


@dataclass
class Mlp:
    up: Float[Tensor, "embed mlp"]
    down: Float[Tensor, "mlp embed"]


@dataclass
class Lm:
    tok: Float[Tensor, "vocab embed"]
    blocks: Annotated[list[Mlp], "layers"]


@dataclass
class One(Generic[T]):
    of: T


def mlp():
    return Mlp(torch.empty(4, 8), torch.empty(8, 4))


def axes(value):
    """The specs of a tree as text, by path."""
    paths, _, _ = tree.flatten_with_path(value)
    return {p: None if s is None else str(s) for p, s in zip(paths, tree.logical_specs(value), strict=True)}


def axes_of(annotation, value):
    """The specs of the leaves of a field with this annotation."""
    holder = type("Holder", (), {"__annotations__": {"x": annotation}})
    return list(axes(dataclass(holder)(value)).values())


def vector(ndim=1):
    return torch.empty((2,) * ndim)


def test_a_model():
    assert axes(Lm(torch.empty(9, 4), [mlp(), mlp()])) == {
        "tok": "vocab embed",
        "blocks.0.up": "embed mlp of layers 0/2",
        "blocks.0.down": "mlp embed of layers 0/2",
        "blocks.1.up": "embed mlp of layers 1/2",
        "blocks.1.down": "mlp embed of layers 1/2",
    }


def test_annotations_need_no_tensors():
    assert axes(Mlp(up="a partition spec", down=None)) == {"up": "embed mlp"}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Float[Tensor, "embed mlp"], "embed mlp"),
        (Float[Tensor, "embed=2 #mlp"], "embed=2 mlp"),
        (Float[Tensor, "_ 2"], "_ 2"),
        (Float[Tensor, "embed"], "embed"),  # another rank than the leaf: not for this module to judge
        (Float[Tensor, "..."], None),
        (Float[Tensor, "*batch embed"], "_ embed"),
        (Float[Tensor, "embed mlp ..."], "embed mlp"),
        (Float[Float[Tensor, "mlp"], "embed"], "embed mlp"),
        (Float[Any, "embed mlp"], "embed mlp"),
        (Annotated[Float[Tensor, "embed qkv"], "embed (3 heads 64)"], "embed (3 heads 64)"),
        (Annotated[Tensor, "embed mlp"], "embed mlp"),
        (Annotated[Any, 7, "embed mlp"], "embed mlp"),
        (Annotated[Float[Tensor, "embed mlp"], 7], "embed mlp"),
        (Float[Tensor, "embed mlp"] | None, "embed mlp"),
        (Optional[Float[Tensor, "embed mlp"]], "embed mlp"),  # noqa: UP045
        (Union[Float[Tensor, "one"], Int[Tensor, "embed mlp"]], "embed mlp"),  # noqa: UP007
        (NewType("Weight", Float[Tensor, "embed mlp"]), "embed mlp"),
        (Tensor, None),
        (Any, None),
        (T, None),
        (list[Float[Tensor, "embed mlp"]], None),
        (Annotated[list[Tensor], "layers"], None),
    ],
)
def test_an_annotated_leaf(annotation, text):
    assert axes_of(annotation, vector(2)) == [text]


@pytest.mark.parametrize("annotation", [int, float, bool, Annotated[int, "counts from one"], float | None])
def test_a_python_scalar_has_no_logical_axes(annotation):
    assert axes_of(annotation, 3) == [None]


A, B = Float[Tensor, "a"], Float[Tensor, "b"]


class Moments(NamedTuple):
    mu: Any
    nu: Any


@pytest.mark.parametrize(
    ("annotation", "value", "texts"),
    [
        (list[A], [vector(), vector()], ["a", "a"]),
        (list[A], (vector(),), ["a"]),
        (Sequence[A], [vector()], ["a"]),
        (tuple[A, B], (vector(), vector()), ["a", "b"]),
        (tuple[A, ...], (vector(), vector()), ["a", "a"]),
        (dict[str, A], {"x": vector(), "y": vector()}, ["a", "a"]),
        (dict[str, list[B]], OrderedDict(x=[vector()]), ["b"]),
        (list[A] | dict[str, B], {"x": vector()}, ["b"]),
        (list[A] | None, None, []),
        (A | list[B], [vector()], ["b"]),
        (Annotated[list[A], "layers"], [vector(), vector()], ["a of layers 0/2", "a of layers 1/2"]),
        (Annotated[list[A] | None, "layers"], [vector()], ["a of layers 0/1"]),
        (Annotated[tuple[A, B], "layers"], (vector(), vector()), ["a of layers 0/2", "b of layers 1/2"]),
        (Annotated[list[Any], "layers"], [vector(2)], ["_ _ of layers 0/1"]),
        (Annotated[list[float], "layers"], [1.0], ["of layers 0/1"]),
        (
            Annotated[list[Annotated[list[A], "layers"]], "stages"],
            [[vector()], [vector(), vector()]],
            [
                "a of stages 0/2 of layers 0/1",
                "a of stages 1/2 of layers 0/2",
                "a of stages 1/2 of layers 1/2",
            ],
        ),
        (list[A], {"not": "a list"}, [None]),
        (Any, Moments(mlp(), [mlp()]), ["embed mlp", "mlp embed"] * 2),
        (dict[str, int], {"x": mlp()}, ["embed mlp", "mlp embed"]),
    ],
)
def test_containers(annotation, value, texts):
    assert axes_of(annotation, value) == texts


def test_the_class_of_the_value_takes_over():
    @dataclass
    class Gated(Mlp):
        gate: Float[Tensor, "embed gate"] = None

    @dataclass
    class Model:
        first: Mlp
        rest: Any

    value = Model(Gated(vector(2), vector(2), vector(2)), {"x": [mlp()]})
    assert axes(value) == {
        "first.up": "embed mlp",
        "first.down": "mlp embed",
        "first.gate": "embed gate",
        "rest.x.0.up": "embed mlp",
        "rest.x.0.down": "mlp embed",
    }


def test_a_subclass_may_annotate_anew():
    @dataclass
    class Other(Mlp):
        up: Float[Tensor, "embed wide"]

    assert axes(Other(vector(2), vector(2))) == {"up": "embed wide", "down": "mlp embed"}


class TestGenerics:
    @pytest.mark.parametrize(
        ("annotation", "value", "texts"),
        [
            (One[A], One(vector()), ["a"]),
            (One[list[A]], One([vector()]), ["a"]),
            (One[Annotated[list[A], "layers"]], One([vector()]), ["a of layers 0/1"]),
            (One[One[B]], One(One(vector())), ["b"]),
            (One[Mlp], One(mlp()), ["embed mlp", "mlp embed"]),
            (One[A] | None, One(vector()), ["a"]),
            (One, One(vector()), [None]),
            (Annotated[list[One[A]], "layers"], [One(vector())], ["a of layers 0/1"]),
        ],
    )
    def test_type_variables_are_substituted(self, annotation, value, texts):
        assert axes_of(annotation, value) == texts

    def test_two_variables_through_two_classes(self):
        @dataclass
        class Pair(Generic[T, U]):
            one: One[T]
            other: U

        assert axes_of(Pair[A, B], Pair(One(vector()), vector())) == ["a", "b"]
        assert axes_of(One[Pair[B, A]], One(Pair(One(vector()), vector()))) == ["b", "a"]

    def test_variables_of_bases(self):
        @dataclass
        class Fixed(One[A]):
            more: B

        @dataclass
        class Nested(One[list[T]], Generic[T]):
            more: T

        @dataclass
        class Renamed(One[U], Generic[U]):
            pass

        assert axes(Fixed(vector(), vector())) == {"of": "a", "more": "b"}
        assert axes_of(Nested[A], Nested([vector()], vector())) == ["a", "a"]
        assert axes_of(One[A], Renamed(vector())) == ["a"]  # a value of a subclass, annotated as the base


class TestErrors:
    @pytest.mark.parametrize(
        ("annotation", "found"),
        [
            (Float[Tensor, "embed (3 heads)"], "jaxtyping.*parentheses"),
            (Annotated[Tensor, "embed (a b)"], "sizes of a and b unknown"),
            (Annotated[Float[Tensor, "a b"], "a b c"], "names 3 dims of an array annotated with 2"),
            (Annotated[list[Mlp], "stages layers"], "not one name"),
            (Annotated[dict[str, Mlp], "layers"], "only a list or an array has logical axes"),
            (Annotated[Mlp, "layers"], "only a list or an array has logical axes"),
            (Annotated[Tensor, "embed", "mlp"], "two texts"),
            (list[Annotated[Tensor, "("]], "has no"),
        ],
    )
    def test_names_that_mean_nothing_are_reported_at_the_first_flatten(self, annotation, found):
        holder = dataclass(type("Holder", (), {"__annotations__": {"x": annotation}}))
        with pytest.raises(TreeError, match=f"(?s){found}.*at Holder.x\nFix: "):
            tree.flatten(holder(1))

    def test_an_annotation_that_cannot_be_resolved(self):
        @dataclass
        class Lost:
            x: "list[Nowhere]"
            n: "NowhereElse" = static(default=3)  # not read: no leaf

        with pytest.raises(TreeError) as caught:
            tree.flatten({"a": Lost([1])})
        assert "Lost.x, 'list[Nowhere]', cannot be resolved: name 'Nowhere' is not defined" in str(
            caught.value
        )
        assert "\nFix: import the names it uses at run time" in str(caught.value)
        tree.known_logical_names()  # is of the classes that can be resolved


def test_known_names():
    @dataclass
    class Names:
        a: Annotated[list[dict[str, Float[Tensor, "name_one"]]], "name_two"]
        b: Annotated[Float[Tensor, "_ name_three"], "_ (3 name_four 2)"] | None
        n: Annotated[int, "not_a_name"]

    known = tree.known_logical_names()
    assert {"name_one", "name_two", "name_three", "name_four", "vocab", "layers"} <= known
    assert "not_a_name" not in known


@dataclass
class Open:
    x: Float[Tensor, "... embed"]


class Shaped:
    shape = (2, 3, 4)


@pytest.mark.parametrize(
    ("leaf", "dims"),
    [
        (vector(1), "embed"),
        (vector(3), "_ _ embed"),
        (Shaped(), "_ _ embed"),
        (2.0, "embed"),
        ("spec", "... embed"),
    ],
)
def test_variadic_dims_are_counted_on_the_leaf(leaf, dims):
    (spec,) = tree.logical_specs(Open(leaf))
    assert str(spec) == dims
    assert (VARIADIC in spec.dims) == isinstance(leaf, str)
