"""masked and multi_transform: another transformation, or none, for some leaves."""

import pytest
import torch

from fparallel import optim, tree
from fparallel.errors import FparallelWarning


@tree.dataclass
class Layer:
    kernel: torch.Tensor
    bias: torch.Tensor


@tree.dataclass
class Model:
    layers: list[Layer]
    head: torch.Tensor


def model(value=1.0):
    layers = [Layer(kernel=torch.full((2, 2), value), bias=torch.full((2,), value)) for _ in range(2)]
    return Model(layers=layers, head=torch.full((2, 3), value))


def by_path(tree_):
    paths, leaves, _ = tree.flatten_with_path(tree_)
    return dict(zip(paths, leaves, strict=True))


def values(tree_):
    """One number per leaf, all of whose entries are equal."""
    return {path: leaf.unique().item() for path, leaf in by_path(tree_).items()}


ALL_LABELS = {
    "a tree": Model(layers=[Layer("train", "frozen")] * 2, head="frozen"),
    "a prefix": Model(layers=[Layer("train", "frozen"), "slow"], head="frozen"),
    "one label": "train",
    "a function": lambda params: tree.map(lambda p: "train" if p.ndim == 2 else "frozen", params),
    "a function to a prefix": lambda params: Model(layers="slow", head="frozen"),
}
EXPECTED = {
    "a tree": dict(zip(by_path(model()), [-1.0, 0.0, -1.0, 0.0, 0.0], strict=True)),
    "a prefix": dict(zip(by_path(model()), [-1.0, 0.0, -0.125, -0.125, 0.0], strict=True)),
    "one label": dict.fromkeys(by_path(model()), -1.0),
    "a function": dict(zip(by_path(model()), [-1.0, 0.0, -1.0, 0.0, -1.0], strict=True)),
    "a function to a prefix": dict(zip(by_path(model()), [-0.125] * 4 + [0.0], strict=True)),
}
TRANSFORMS = {"train": optim.sgd(1.0), "slow": optim.sgd(0.125), "frozen": optim.set_to_zero()}


@pytest.mark.filterwarnings("ignore:no leaf has the label")
@pytest.mark.parametrize("with_params", [True, False])
@pytest.mark.parametrize("name", ALL_LABELS)
def test_each_leaf_gets_the_transformation_of_its_label(name, with_params):
    tx = optim.multi_transform(TRANSFORMS, ALL_LABELS[name])
    grads = model()
    updates, state = tx.update(grads, tx.init(model()), *([model()] if with_params else []))
    assert values(updates) == EXPECTED[name]
    assert tree.structure(updates) == tree.structure(grads)
    assert tree.structure(state) == tree.structure(tx.init(model()))


def test_state_is_held_only_for_the_leaves_of_a_label_and_under_their_paths():
    labels = Model(layers="adam", head="sgd")
    tx = optim.multi_transform({"adam": optim.scale_by_adam(), "sgd": optim.trace(0.9)}, labels)
    assert sorted(by_path(tx.init(model()))) == [
        "inner_states.adam.count",
        "inner_states.adam.mu.layers.0.bias",
        "inner_states.adam.mu.layers.0.kernel",
        "inner_states.adam.mu.layers.1.bias",
        "inner_states.adam.mu.layers.1.kernel",
        "inner_states.adam.nu.layers.0.bias",
        "inner_states.adam.nu.layers.0.kernel",
        "inner_states.adam.nu.layers.1.bias",
        "inner_states.adam.nu.layers.1.kernel",
        "inner_states.sgd.trace.head",
    ]


def test_two_parts_train_as_two_optimizers_would():
    tx = optim.multi_transform({"a": optim.adamw(0.1), "b": optim.sgd(0.1, 0.9)}, Model(layers="a", head="b"))
    adamw, sgd = optim.adamw(0.1), optim.sgd(0.1, 0.9)
    params = model()
    layers, head = params.layers, params.head
    state, layers_state, head_state = tx.init(params), adamw.init(layers), sgd.init(head)
    for step in range(5):
        grads = tree.map(lambda p, s=step: p * (s - 1.5), params)
        updates, state = tx.update(grads, state, params)
        layer_updates, layers_state = adamw.update(grads.layers, layers_state, layers)
        head_updates, head_state = sgd.update(grads.head, head_state, head)
        params = optim.apply_updates(params, updates)
        layers = optim.apply_updates(layers, layer_updates)
        head = optim.apply_updates(head, head_updates)
    assert values(params) == values(Model(layers=layers, head=head))


def test_a_global_norm_inside_is_of_the_part_alone():
    tx = optim.multi_transform(
        {"clip": optim.clip_by_global_norm(1.0), "keep": optim.identity()}, {"a": "clip", "b": "keep"}
    )
    grads = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    updates, _ = tx.update(grads, tx.init(grads))
    torch.testing.assert_close(updates["a"], torch.tensor([0.6, 0.8]))
    assert updates["b"].item() == 12.0


def test_an_unknown_label_names_the_leaf_and_the_nearest_label():
    tx = optim.multi_transform(TRANSFORMS, Model(layers=["train", Layer("train", "frozne")], head="slow"))
    with pytest.raises(optim.OptimError) as error:
        tx.init(model())
    message = str(error.value)
    assert "'frozne' has no transformation (did you mean 'frozen'?)" in message
    assert "at layers.1.bias" in message
    assert message.splitlines()[-1].startswith("Fix: ")


def test_a_label_that_no_leaf_has_is_a_warning():
    with pytest.warns(FparallelWarning, match="no leaf has the label 'slow'"):
        optim.multi_transform(TRANSFORMS, Model(layers="train", head="frozen")).init(model())


def test_labels_of_another_structure_are_refused_with_the_path():
    tx = optim.multi_transform(TRANSFORMS, Model(layers=["train"], head="slow"))
    with pytest.raises(optim.OptimError, match="param_labels does not have the structure") as error:
        tx.init(model())
    assert "at layers" in str(error.value)


def test_masked_passes_the_other_updates_on():
    tx = optim.masked(optim.scale(-2.0), Model(layers=[True, Layer(False, True)], head=False))
    updates, _ = tx.update(model(), tx.init(model()))
    assert list(values(updates).values()) == [-2.0, -2.0, 1.0, -2.0, 1.0]


def test_masked_holds_no_state_for_the_other_leaves():
    tx = optim.masked(optim.scale_by_adam(), Model(layers=False, head=True))
    assert sorted(by_path(tx.init(model()))) == [
        "inner_state.count",
        "inner_state.mu.head",
        "inner_state.nu.head",
    ]


def test_a_mask_may_select_nothing():
    tx = optim.masked(optim.adamw(0.1), lambda params: False)
    updates, state = tx.update(model(), tx.init(model()), model())
    assert values(updates) == values(model())
    assert int(state.inner_state[0].count) == 1


def test_a_tree_that_is_one_leaf_can_be_masked_out():
    tx = optim.masked(optim.adamw(0.1), False)
    params = torch.ones(2)
    updates, state = tx.update(torch.full((2,), 3.0), tx.init(params), params)
    assert updates.tolist() == [3.0, 3.0]
    assert state.inner_state[0].mu == optim.MaskedNode()


def test_masks_nest():
    """Weight decay on the matrices among the trained leaves."""
    matrices = lambda params: tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
    train = optim.chain(optim.add_decayed_weights(0.5, matrices), optim.scale(-1.0))
    tx = optim.multi_transform(
        {"train": train, "frozen": optim.set_to_zero()}, Model(layers=["train", "frozen"], head="train")
    )
    updates, _ = tx.update(model(1.0), tx.init(model(4.0)), model(4.0))
    assert list(values(updates).values()) == [-3.0, -1.0, 0.0, 0.0, -3.0]


@pytest.mark.parametrize("mask", [torch.tensor(True), 1, "True"])
def test_a_mask_that_is_not_a_bool_is_refused(mask):
    tx = optim.masked(optim.scale(2.0), Model(layers=True, head=mask))
    with pytest.raises(optim.OptimError, match=r"expected True or False(.|\n)*at head\nFix: "):
        tx.init(model())


def test_updates_of_another_structure_are_refused():
    tx = optim.masked(optim.scale(2.0), lambda params: True)
    state = tx.init([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(optim.OptimError, match="1 leaves where the parameters have 2"):
        tx.update([torch.zeros(1)], state, [torch.zeros(1), torch.zeros(1)])


def test_a_registered_class_with_a_call_method_is_a_mask_not_a_function():
    @tree.dataclass
    class Callable:
        w: torch.Tensor
        b: torch.Tensor

        def __call__(self, x):
            raise AssertionError("the mask was called")

    tx = optim.masked(optim.scale(2.0), Callable(w=True, b=False))
    grads = Callable(w=torch.ones(1), b=torch.ones(1))
    updates, _ = tx.update(grads, tx.init(grads))
    assert values(updates) == {"w": 2.0, "b": 1.0}
