"""What holds for every optimizer and every atom."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fparallel import optim, tree


@tree.dataclass
class Params:
    kernel: torch.Tensor
    rest: tuple


MATRICES = lambda params: tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
SCHEDULE = optim.warmup_cosine_decay_schedule(0.1, 0.5, warmup_steps=2, decay_steps=6)

TRANSFORMATIONS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9),
    "nesterov": optim.sgd(0.1, 0.9, nesterov=True),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(0.1),
    "adamw on matrices": optim.adamw(0.1, mask=MATRICES),
    "lion": optim.lion(0.1),
    "scheduled sgd": optim.sgd(SCHEDULE, 0.9),
    "scheduled adamw": optim.adamw(SCHEDULE),
    "scheduled lion": optim.lion(SCHEDULE),
    "clipped adamw": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)),
    "lr as a tensor": optim.adamw(torch.tensor(0.1)),
    "lr as a double": optim.sgd(torch.tensor(0.1, dtype=torch.float64), 0.9),
    "masked": optim.masked(optim.adamw(0.1), MATRICES),
    "multi_transform": optim.multi_transform(
        {"a": optim.adamw(0.1), "b": optim.lion(SCHEDULE)},
        lambda params: tree.map(lambda p: "a" if p.ndim >= 2 else "b", params),
    ),
    "identity": optim.identity(),
    "set_to_zero": optim.set_to_zero(),
    "clip": optim.clip(0.2),
    "clip_by_global_norm": optim.clip_by_global_norm(0.5),
    "scale": optim.scale(-0.1),
    "trace": optim.trace(0.9),
    "scale_by_adam": optim.scale_by_adam(),
    "scale_by_lion": optim.scale_by_lion(),
    "scale_by_schedule": optim.scale_by_schedule(SCHEDULE),
    "add_decayed_weights": optim.add_decayed_weights(0.1),
}


def leaf(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


TREES = {
    "dict": lambda **kw: {"b": leaf(3, **kw), "w": leaf(2, 3, **kw)},
    "tuple in a list": lambda **kw: [(leaf(2, 2, **kw), leaf(1, **kw)), leaf(4, **kw)],
    "dataclass": lambda **kw: Params(kernel=leaf(3, 2, **kw), rest=(leaf(2, **kw), {"s": leaf(1, 1, **kw)})),
    "0-d leaves": lambda **kw: {"temperature": leaf(**kw), "w": leaf(2, 2, **kw)},
    "zero-size leaves": lambda **kw: {"none": leaf(0, **kw), "empty": leaf(3, 0, **kw), "w": leaf(2, **kw)},
    "None subtrees": lambda **kw: {"w": leaf(2, 2, **kw), "frozen": None, "list": [None, leaf(1, **kw)]},
    "strided leaves": lambda **kw: {"w": leaf(4, 3, **kw).T, "b": leaf(6, **kw)[::2]},
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

every_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)
every_tree = pytest.mark.parametrize("tree_name", TREES)
ignore_unused_labels = pytest.mark.filterwarnings("ignore:no leaf has the label")


def train(tx, make, dtype, num_steps=3):
    params = make(dtype=dtype, seed=0)
    state = tx.init(params)
    for step in range(num_steps):
        updates, state = tx.update(make(dtype=dtype, seed=step + 1), state, params)
        params = optim.apply_updates(params, updates)
    return params, updates, state


@ignore_unused_labels
@every_transformation
@every_tree
def test_structure_shapes_and_dtypes_are_kept(name, tree_name):
    tx, make = TRANSFORMATIONS[name], TREES[tree_name]
    for dtype in DTYPES:
        before = make(dtype=dtype, seed=0)
        initial = tx.init(before)
        params, updates, state = train(tx, make, dtype)
        for after in (params, updates, state):
            expected = initial if after is state else before
            assert tree.structure(after) == tree.structure(expected)
            paths, new_leaves, _ = tree.flatten_with_path(after)
            for path, old, new in zip(paths, tree.leaves(expected), new_leaves, strict=True):
                assert new.shape == old.shape, path
                assert new.dtype == (torch.int64 if path.endswith("count") else dtype), path
                assert new.isfinite().all(), path


@ignore_unused_labels
@every_transformation
@every_tree
def test_nothing_is_modified(name, tree_name):
    tx, make = TRANSFORMATIONS[name], TREES[tree_name]
    params, grads = make(dtype=torch.float32, seed=0), make(dtype=torch.float32, seed=1)
    _, state = tx.update(grads, tx.init(params), params)  # a state that is no longer zero
    args = [grads, state, params]
    before = [tree.map(torch.clone, arg) for arg in args]
    versions = [x._version for x in tree.leaves(args)]
    updates, _ = tx.update(*args)
    optim.apply_updates(params, updates)
    assert [x._version for x in tree.leaves(args)] == versions
    for old, new in zip(tree.leaves(before), tree.leaves(args), strict=True):
        assert torch.equal(old, new)


@ignore_unused_labels
@every_transformation
def test_the_same_input_gives_the_same_output(name):
    tx, make = TRANSFORMATIONS[name], TREES["dataclass"]
    first, second = train(tx, make, torch.float32), train(tx, make, torch.float32)
    for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True):
        assert torch.equal(a, b)


@ignore_unused_labels
@every_transformation
def test_how_the_leaves_are_arranged_does_not_matter(name):
    """Equal leaves in a dict, in a tuple and in a dataclass get equal updates."""
    tx, (w, b) = (
        TRANSFORMATIONS[name],
        (leaf(3, 2, dtype=torch.float64, seed=0), leaf(2, dtype=torch.float64, seed=1)),
    )
    arranged = [{"a": w, "b": b}, (w, [b]), Params(kernel=w, rest=(b,))]
    results = []
    for params in arranged:
        grads = tree.map(lambda p: p * 0.5 + 1, params)
        results.append(tree.leaves(tx.update(grads, tx.init(params), params)[0]))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], result, strict=True))


@ignore_unused_labels
@every_transformation
@pytest.mark.parametrize("empty", [{}, [], {"a": None}])
def test_a_tree_without_leaves_is_legal(name, empty):
    tx = TRANSFORMATIONS[name]
    updates, state = tx.update(empty, tx.init(empty), empty)
    assert updates == empty
    assert tree.structure(state) == tree.structure(tx.init(empty))
    assert optim.apply_updates(empty, updates) == empty


@ignore_unused_labels
@every_transformation
def test_integer_leaves_ride_along(name):
    tx = TRANSFORMATIONS[name]
    params = {
        "w": torch.ones(2, 2),
        "table": torch.tensor([2**40 + 1, -7]),
        "flag": torch.tensor([[True, False]]),
    }
    grads = {"w": torch.ones(2, 2), "table": torch.tensor([0, 0]), "flag": torch.tensor([[False, False]])}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    assert params["table"].tolist() == [2**40 + 1, -7]
    assert params["flag"].tolist() == [[True, False]]
    assert params["table"].dtype == torch.int64


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw", "lion"])
@pytest.mark.parametrize(
    "param_dtype, grad_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_gradients_of_another_dtype_than_the_parameters(name, param_dtype, grad_dtype):
    """Moments are in the dtype of the parameters; the update keeps float32 until it is applied."""
    tx, make = TRANSFORMATIONS[name], TREES["dict"]
    params, grads = make(dtype=param_dtype, seed=0), make(dtype=grad_dtype, seed=1)
    updates, state = tx.update(grads, tx.init(params), params)
    assert {u.dtype for u in tree.leaves(updates)} == {torch.float32}
    assert {s.dtype for s in tree.leaves(state)} <= {param_dtype, torch.int64}
    assert {p.dtype for p in tree.leaves(optim.apply_updates(params, updates))} == {param_dtype}


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw", "lion", "clipped adamw"])
def test_every_optimizer_finds_the_bottom_of_a_bowl(name):
    tx, target = TRANSFORMATIONS[name], torch.tensor([1.0, -2.0, 3.0])
    params = {"x": torch.zeros(3)}
    state = tx.init(params)
    loss = lambda p: float((p["x"] - target).square().sum())  # noqa: E731
    start = loss(params)
    for _ in range(60):
        updates, state = tx.update({"x": 2 * (params["x"] - target)}, state, params)
        params = optim.apply_updates(params, updates)
    assert loss(params) < 0.1 * start


@ignore_unused_labels
@every_transformation
def test_init_and_update_trace(name):
    """On fake tensors nothing looks at a value, and the graph computes what the functions compute."""
    tx, make = TRANSFORMATIONS[name], TREES["dict"]

    def two_steps(params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        return params["b"], params["w"]

    args = make(dtype=torch.float32, seed=0), make(dtype=torch.float32, seed=1)
    graph = make_fx(two_steps, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    other = make(dtype=torch.float32, seed=2), make(dtype=torch.float32, seed=3)
    for traced, eager in zip(graph(*other), two_steps(*other), strict=True):
        assert torch.equal(traced, eager)
