"""Dataclasses that are nodes of pytrees."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree

import fparallel.tree as tree
from fparallel.errors import TreeError
from fparallel.tree import TrainState, dataclass, static


@dataclass
class Linear:
    weight: Any
    bias: Any = None
    activation: str = static(default="relu")


@dataclass(kw_only=True, eq=False)
class Scale:
    by: Any = 2.0
    axes: tuple[int, ...] = static(default_factory=tuple)


def test_fields_are_children_and_static_fields_are_structure():
    leaves, treedef = tree.flatten(Linear(1, 2))
    assert leaves == [1, 2]
    assert treedef == tree.structure(Linear(3, 4))
    assert treedef != tree.structure(Linear(3, 4, activation="gelu"))
    assert tree.unflatten(treedef, [5, 6]) == Linear(5, 6, "relu")


def test_instances_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Linear(1).weight = 2


def test_the_decorator_takes_options():
    assert tree.leaves(Scale(by=1, axes=(0,))) == [1]
    assert Scale(by=1) != Scale(by=1)  # eq=False: by identity
    with pytest.raises(TypeError):
        Scale(1)


def test_unflattening_bypasses_init():
    made = []

    @dataclass
    class Checked:
        x: Any

        def __post_init__(self):
            made.append(self.x)

    doubled = tree.map(lambda x: 2 * x, Checked(1))
    assert (doubled.x, made) == (2, [1])


def test_replace_changes_fields_and_keeps_the_rest():
    assert Linear(1, 2, "gelu").replace(bias=3) == Linear(1, 3, "gelu")


def test_replace_offers_the_nearest_name():
    with pytest.raises(TreeError, match=r"Linear has no field 'wieght': did you mean 'weight'\?"):
        Linear(1).replace(wieght=2)


def test_a_class_keeps_its_own_replace():
    @dataclass
    class Own:
        x: Any

        def replace(self):
            return "mine"

    @dataclass
    class Field:
        replace: Any

    assert Own(1).replace() == "mine"
    assert Field(3).replace == 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "list, which cannot be hashed"),
        (np.zeros(2), "ndarray, which cannot be hashed"),
        (torch.zeros(2), "Tensor, which cannot be compared"),
    ],
)
def test_a_static_value_must_be_hashable_and_comparable(value, reason):
    with pytest.raises(TreeError, match=rf"(?s)Linear.activation holds a value of type {reason}.*Fix: "):
        tree.flatten(Linear(1, activation=value))


def test_a_decorated_subclass_is_a_node():
    @dataclass
    class Gated(Linear):
        gate: Any = 0

    assert tree.flatten_with_path(Gated(1, 2, gate=3))[0] == ["weight", "bias", "gate"]
    assert type(tree.map(str, Gated(1))) is Gated


def test_an_undecorated_subclass_is_an_error():
    class Forgotten(Linear):
        pass

    with pytest.raises(TreeError, match=r"(?s)Forgotten is an undecorated subclass of Linear.*Fix: decorate"):
        tree.flatten([Forgotten(1)])


def test_a_class_is_decorated_once():
    with pytest.raises(TreeError, match="registered already"):
        dataclass(Linear)


def test_a_class_without_children_or_without_fields():
    @dataclass
    class Empty:
        pass

    @dataclass
    class OnlyStatic:
        n: int = static(default=3)

    assert tree.leaves([Empty(), OnlyStatic()]) == []
    assert tree.map(str, OnlyStatic(4)) == OnlyStatic(4)


def test_train_state():
    state = TrainState(step=0, params={"w": 1}, opt_state=[2], key=3)
    assert tree.flatten_with_path(state)[0] == ["step", "params.w", "opt_state.0", "key"]
    assert state.replace(step=1).step == 1
    assert TrainState(0, {}, ()).key is None
    with pytest.raises(TreeError, match="did you mean 'params'"):
        state.replace(parms={})


class TestTorch:
    def test_torch_func_sees_into_a_class(self):
        params = Linear(torch.tensor([1.0, 2.0]), torch.tensor(3.0))
        grads = torch.func.grad(lambda p: (p.weight**2).sum() * p.bias)(params)
        assert torch.equal(grads.weight, torch.tensor([6.0, 12.0]))
        assert torch.equal(grads.bias, torch.tensor(5.0))

    def test_none_in_a_field_is_no_leaf(self):
        grads = torch.func.grad(lambda p: p.weight**2)(Linear(torch.tensor(3.0), None, "gelu"))
        assert grads == Linear(torch.tensor(6.0), None, "gelu")

    def test_torch_round_trip_and_paths(self):
        leaves, spec = torch_pytree.tree_flatten([Linear(1, None, "gelu")])
        assert leaves == [1]
        assert torch_pytree.tree_unflatten(leaves, spec) == [Linear(1, None, "gelu")]
        assert spec != torch_pytree.tree_structure([Linear(1, None, "relu")])
        ((path, leaf),) = torch_pytree.tree_flatten_with_path(Linear(1))[0]
        assert (torch_pytree.keystr(path), leaf) == (".weight", 1)
