"""Pytrees: flatten, paths, map, prefixes, dotted dictionaries."""

import operator
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fparallel.tree as tree
from fparallel.errors import TreeError
from fparallel.tree import dataclass, static


@dataclass
class Node:
    left: Any
    right: Any = None
    kind: str = static(default="k")


class Moments(NamedTuple):
    mu: Any
    nu: Any


keys = st.text("abcxyz_", min_size=1, max_size=3)  # no dots: a path then has one reading
trees = st.recursive(
    st.one_of(st.integers(), st.none(), st.just("leaf"), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Moments, inner, inner),
        st.builds(Node, inner, inner, st.sampled_from("kl")),
    ),
    max_leaves=12,
)


class TestFlatten:
    def test_dict_keys_are_sorted_and_none_has_no_leaves(self):
        leaves, treedef = tree.flatten({"b": [1, None], "a": (2, Node(3))})
        assert leaves == [2, 3, 1]
        assert treedef.num_leaves == 3

    @pytest.mark.parametrize("leaf", [1, "s", torch.ones(2), torch.Size([1, 2]), object(), {1, 2}, ...])
    def test_anything_else_is_a_leaf(self, leaf):
        assert tree.leaves([leaf])[0] is leaf
        assert tree.flatten_with_path(leaf)[0] == [""]

    def test_is_leaf_stops_the_walk(self):
        assert tree.leaves([None, [1, 2]], is_leaf=lambda x: x is None or x == [1, 2]) == [None, [1, 2]]

    def test_the_container_types_come_back(self):
        value = OrderedDict(z=deque([1]), a=defaultdict(list, {"k": 2}), m=Moments(3, None))
        back = tree.map(lambda x: x, value)
        assert back == value
        assert [type(v) for v in back.values()] == [deque, defaultdict, Moments]

    def test_a_wrong_number_of_leaves(self):
        with pytest.raises(TreeError, match=r"(?s)of 2 leaves was given 3.*Fix: "):
            tree.unflatten(tree.structure([1, 2]), [1, 2, 3])

    @given(trees)
    def test_unflatten_inverts_flatten(self, value):
        leaves, treedef = tree.flatten(value)
        assert tree.unflatten(treedef, leaves) == value
        assert tree.unflatten(treedef, iter(leaves)) == value
        assert (tree.leaves(value), tree.structure(value)) == (leaves, treedef)

    @given(trees)
    def test_a_structure_forgets_the_leaves(self, value):
        other = tree.map(lambda _: object(), value)
        assert tree.structure(other) == tree.structure(value)
        assert hash(tree.structure(other)) == hash(tree.structure(value))


def at(value, path):
    """What stands at a dotted path."""
    for key in path.split("."):
        if isinstance(value, dict):
            value = value[key]
        elif hasattr(value, key):
            value = getattr(value, key)
        else:
            value = value[int(key)]
    return value


class TestPaths:
    def test_a_path_joins_keys_and_indices(self):
        value = {"params": Node([1, (2,)], {"deep.er": 3, 7: 4}), "moments": Moments(5, 6)}
        paths, leaves, _ = tree.flatten_with_path(value)
        assert dict(zip(paths, leaves, strict=True)) == {
            "params.left.0": 1,
            "params.left.1.0": 2,
            "params.right.deep.er": 3,
            "params.right.7": 4,
            "moments.mu": 5,
            "moments.nu": 6,
        }

    @given(trees.filter(lambda t: tree.structure(t).num_nodes > 1))
    def test_paths_are_unique_and_lead_to_the_leaves(self, value):
        paths, leaves, _ = tree.flatten_with_path(value)
        assert len(set(paths)) == len(paths)
        assert all(at(value, path) is leaf for path, leaf in zip(paths, leaves, strict=True))

    @pytest.mark.parametrize("value", [{"a.b": 1, "a": {"b": 2}}, {"a": {"b": 1}, "a.b": 2}])
    def test_two_leaves_of_one_path_are_an_error(self, value):
        with pytest.raises(TreeError, match=r"(?s)same path.*at a.b\nFix: rename"):
            tree.flatten_with_path(value)

    def test_join_path(self):
        assert tree.join_path("state", "params.blocks", 3, "", "up") == "state.params.blocks.3.up"
        assert tree.join_path("", "") == ""


class TestMap:
    def test_map_over_several_trees(self):
        total = tree.map(operator.add, Node(1, [2]), Node(10, [20]))
        assert total == Node(11, [22])

    def test_a_later_tree_may_have_subtrees_at_the_leaves(self):
        assert tree.map(lambda a, b: (a, b), [1, 2], [[3, 4], None]) == [(1, [3, 4]), (2, None)]

    def test_map_with_path(self):
        assert tree.map_with_path(lambda p, x, y: f"{p}={x + y}", Node([1]), Node([2])) == Node(["left.0=3"])

    def test_an_error_of_the_function_is_its_own(self):
        with pytest.raises(ZeroDivisionError):
            tree.map(lambda x: 1 // x, [0])

    @pytest.mark.parametrize(
        ("first", "other", "found"),
        [
            ({"a": [1, 2]}, {"a": [1]}, r"a list of 2, the other a list of 1\n  at a\n"),
            ({"a": {"x": 1}}, {"a": {"y": 1}}, r"a dict of {x}, the other a dict of {y}\n  at a\n"),
            ({"a": [1]}, {"a": (1,)}, r"a list of 1, the other a tuple of 1\n  at a\n"),
            (
                [Node(1)],
                [3],
                r"a Node of {left, right}; static kind='k', the other a leaf of type int\n  at 0\n",
            ),
            ([Node(1)], [Node(1, kind="l")], r"static kind='k', .*static kind='l'\n  at 0\n"),
            (Node(1, None), Node(1, 2), r"None, the other a leaf of type int\n  at right\n"),
            (Node(1, 2), None, r"a Node of {left, right}; static kind='k', the other None\n  at the root\n"),
            ([[1], [2]], [[1], {}], r"a list of 1, the other a dict of {}\n  at 1\n"),
        ],
    )
    def test_trees_that_differ(self, first, other, found):
        with pytest.raises(TreeError, match=f"(?s)two trees differ: the first tree has .*{found}Fix: "):
            tree.map(lambda *x: x, first, other)

    def test_dicts_of_another_kind_are_the_same_structure(self):
        assert tree.map(operator.add, {"a": 1, "b": 2}, OrderedDict(b=20, a=10)) == {"a": 11, "b": 22}

    def test_reduce(self):
        assert tree.reduce(operator.add, Node(["a"], "b")) == "ab"
        assert tree.reduce(operator.add, Node("a", "b"), "c") == "cab"
        assert tree.reduce(operator.add, [], None) is None
        with pytest.raises(TreeError, match="nothing to reduce"):
            tree.reduce(operator.add, {"a": None})

    @given(trees)
    def test_map_with_the_identity_is_the_identity(self, value):
        assert tree.map(lambda x: x, value) == value

    @given(trees)
    def test_map_composes(self, value):
        twice = tree.map(lambda x: [str(x)], value)
        assert tree.map(lambda x: [x], tree.map(str, value)) == twice


class TestMatchPrefix:
    @pytest.mark.parametrize(
        ("prefix", "full", "matched"),
        [
            ({"a": 1, "b": 2}, {"a": ["x", "y"], "b": "z"}, [1, 1, 2]),
            ("s", Node(1, [2, 3]), ["s", "s", "s"]),
            (Node("s", "t"), Node([1, 2], None), ["s", "s"]),
            ((), (), []),
        ],
    )
    def test_a_leaf_covers_what_is_below_it(self, prefix, full, matched):
        assert tree.match_prefix(prefix, full) == matched

    def test_is_leaf_is_asked_of_the_prefix(self):
        assert tree.match_prefix([None, (1,)], [[7, 8], 9], is_leaf=lambda x: x is None or x == (1,)) == [
            None,
            None,
            (1,),
        ]

    def test_a_mismatch_names_the_path(self):
        with pytest.raises(
            TreeError, match=r"(?s)the prefix has a list of 1, the other a list of 2\n  at p.left\nFix: "
        ):
            tree.match_prefix({"p": Node([1])}, {"p": Node([1, 2])})
        with pytest.raises(
            TreeError, match=r"(?s)the prefix has None, the other a leaf of type int\n  at 0\nFix: "
        ):
            tree.match_prefix([None], [1])

    @given(trees)
    def test_a_tree_is_a_prefix_of_itself(self, value):
        assert tree.match_prefix(value, value) == tree.leaves(value)

    @given(trees, st.data())
    def test_cutting_a_tree_gives_a_prefix(self, value, data):
        cut = tree.map(lambda x: "cut", value, is_leaf=lambda x: x is not None and data.draw(st.booleans()))
        assert tree.match_prefix(cut, value) == ["cut"] * len(tree.leaves(value))


class TestUnflattenDotted:
    @pytest.mark.parametrize(
        ("flat", "nested"),
        [
            ({}, {}),
            ({"a": 1}, {"a": 1}),
            ({"wte": 1, "h.0.w": 2, "h.1.w": 3}, {"wte": 1, "h": [{"w": 2}, {"w": 3}]}),
            (
                {"0.w": 1, "2.w": 2},
                [{"w": 1}, None, {"w": 2}],
            ),  # nn.Sequential with a module without parameters
            ({"a.10": 1, **{f"a.{i}": 0 for i in range(10)}}, {"a": [0] * 10 + [1]}),
            ({"a.0": 1, "a.b": 2}, {"a": {"0": 1, "b": 2}}),
            ({"a.01": 1}, {"a": {"01": 1}}),
            ({"a.-1": 1}, {"a": {"-1": 1}}),
            ({"a": {"b.c": 1}}, {"a": {"b.c": 1}}),  # a value stays what it is
            ({"a": {"0": 1}}, {"a": {"0": 1}}),
            ({"": 1}, {"": 1}),
        ],
    )
    def test_keys_are_split(self, flat, nested):
        assert tree.unflatten_dotted(flat) == nested

    @pytest.mark.parametrize("flat", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}])
    def test_a_leaf_is_no_node(self, flat):
        with pytest.raises(TreeError, match=r"(?s)a leaf and of a node\n  at a\nFix: "):
            tree.unflatten_dotted(flat)

    def test_a_key_is_a_string(self):
        with pytest.raises(TreeError, match=r"(?s)the key 3 is no dotted path.*Fix: "):
            tree.unflatten_dotted({3: 1})

    def test_a_module(self):
        module = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False)
        )
        state = module.state_dict()
        nested = tree.unflatten_dotted(state)
        assert tree.flatten_with_path(nested)[0] == ["0.bias", "0.weight", "2.weight"]
        assert nested[2]["weight"] is state["2.weight"]

    parts = st.one_of(st.sampled_from(["a", "b", "01", "x1"]), st.integers(0, 3).map(str))

    @given(st.sets(st.lists(parts, min_size=1, max_size=4).map(".".join), min_size=1))
    def test_paths_survive(self, paths):
        leaves = {p: p for p in paths if not any(q.startswith(p + ".") for q in paths)}
        back, values, _ = tree.flatten_with_path(tree.unflatten_dotted(leaves))
        assert dict(zip(back, values, strict=True)) == leaves


def test_the_paths_of_a_structure_are_the_callers_own():
    model = [Node(i, {"w": i}) for i in range(48)]
    first = tree.paths(tree.structure(model))
    assert first[:3] == ["0.left", "0.right.w", "1.left"]
    first[0] = "changed by the caller"
    assert tree.paths(tree.structure(model))[0] == "0.left"
