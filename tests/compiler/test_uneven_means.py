"""Plain results that are divided by what a micro-batch holds: their mean is not the value of the whole batch."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import fparallel as fp
from fparallel.errors import FparallelWarning, TraceError

F64 = torch.float64
ROWS, LENGTH, DIM, CLASSES = 8, 3, 5, 4


def matrix(seed, *shape):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def params():
    return {"w": matrix(0, DIM, CLASSES), "g": matrix(1, DIM), "t": matrix(2)}


def batch():
    mask = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 5 % 3 != 1  # 4, 5 or 6 of a micro-batch
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"x": matrix(4, ROWS, LENGTH, DIM), "y": labels, "mask": mask.to(F64), "n": mask.sum(1)}


def logits(p, b):
    return (torch.tanh(b["x"]) @ p["w"]).flatten(0, 1)


def nll(p, b):
    return F.cross_entropy(logits(p, b), b["y"].flatten(), reduction="none").view_as(b["y"])


def ignored(b, label=-100):
    return torch.where(b["mask"] > 0, b["y"], label).flatten()


def masked_fill(b):
    return b["y"].masked_fill(b["mask"] == 0, -100).flatten()


def written(b):
    labels = b["y"].clone()
    labels[b["mask"] == 0] = -100
    return labels.flatten()


@fp.block
def head(p, b):
    return (nll(p, b) * b["mask"]).sum() / b["mask"].sum()


@fp.block
def total_of(b):
    return b["mask"].sum()


@fp.block
def norm(p, x):
    centred = x - x.mean((0, 1))
    return centred / (centred.square().mean((0, 1)) + 1e-5).sqrt() * p["g"]


def normed_logits(p, b):
    return torch.tanh(norm(p, b["x"])) @ p["w"]


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=F64)

UNEVEN = {
    "masked": lambda p, b: (nll(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "clamped": lambda p, b: (nll(p, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "means": lambda p, b: (nll(p, b) * b["mask"]).mean() / b["mask"].mean(),
    "counts": lambda p, b: (nll(p, b) * b["mask"]).sum() / b["n"].sum(),
    "bool": lambda p, b: (nll(p, b) * b["mask"]).sum() / (b["mask"] > 0).sum(),
    "labels": lambda p, b: (nll(p, b) * (b["y"] != 2)).sum() / (b["y"] != 2).sum(),
    "kept dims": lambda p, b: ((nll(p, b) * b["mask"]) / b["mask"].sum((0, 1), keepdim=True)).sum(),
    "expanded": lambda p, b: (nll(p, b) * b["mask"] / b["mask"].sum().expand(len(b["n"]), LENGTH)).sum(),
    "weights": lambda p, b: (nll(p, b) * (b["mask"] / b["mask"].sum())).sum(),
    "reciprocal": lambda p, b: (nll(p, b) * b["mask"]).sum() * b["mask"].sum().reciprocal(),
    "one over": lambda p, b: (1 / b["mask"].sum()) * (nll(p, b) * b["mask"]).sum(),
    "power": lambda p, b: (nll(p, b) * b["mask"]).sum() * b["mask"].sum() ** -1,
    "position": lambda p, b: ((nll(p, b) * b["mask"]).sum(0) / b["mask"].sum(0)).mean(),
    "flat": lambda p, b: (nll(p, b) * b["mask"]).flatten().sum() / b["mask"].flatten().sum(),
    "sum of terms": lambda p, b: (
        p["w"].square().sum() - 0.5 * (nll(p, b) * b["mask"]).sum() / b["mask"].sum()
    ),
    "zero safe": lambda p, b: torch.where(
        b["n"].sum() > 0, (nll(p, b) * b["mask"]).sum() / b["n"].sum(), 0.0
    ),
    "nan safe": lambda p, b: torch.nan_to_num((nll(p, b) * b["mask"]).sum() / b["mask"].sum()),
    "cast": lambda p, b: ((nll(p, b) * b["mask"]).sum() / b["mask"].sum()).float(),
    "learned weight": lambda p, b: p["t"] * (nll(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "ignore_index": lambda p, b: F.cross_entropy(logits(p, b), ignored(b, 1), ignore_index=1),
    "set to ignore_index": lambda p, b: F.cross_entropy(logits(p, b), ignored(b)),
    "filled with ignore_index": lambda p, b: F.cross_entropy(logits(p, b), masked_fill(b)),
    "written ignore_index": lambda p, b: F.cross_entropy(logits(p, b), written(b)),
    "smooth": lambda p, b: F.cross_entropy(logits(p, b), ignored(b), label_smoothing=0.1),
    "class weights": lambda p, b: F.cross_entropy(logits(p, b), b["y"].flatten(), weight=WEIGHTS),
    "nll_loss": lambda p, b: F.nll_loss(logits(p, b).log_softmax(-1), ignored(b, 0), ignore_index=0),
    "in a block": head,
    "denominator of a block": lambda p, b: (nll(p, b) * b["mask"]).sum() / total_of(b),
}

EVEN = {
    "mean": lambda p, b: nll(p, b).mean(),
    "Mean": lambda p, b: fp.Mean((nll(p, b) * b["mask"]).sum(), b["mask"].sum()),
    "Means": lambda p, b: (
        fp.Mean((nll(p, b) * b["mask"]).sum(), b["mask"].sum()) + 0.1 * fp.Mean(nll(p, b).sum(), b["n"].sum())
    ),
    "Mean of one": lambda p, b: fp.Mean(head(p, b), torch.ones(())),
    "size": lambda p, b: (nll(p, b) * b["mask"]).sum() / b["mask"].numel(),
    "ones": lambda p, b: nll(p, b).sum() / torch.ones_like(b["mask"]).sum(),
    "ones of activations": lambda p, b: nll(p, b).sum() / torch.ones_like(nll(p, b)).sum(),
    "cross entropy": lambda p, b: F.cross_entropy(logits(p, b), b["y"].flatten()),
    "smooth": lambda p, b: F.cross_entropy(logits(p, b), b["y"].flatten(), label_smoothing=0.1),
    "summed": lambda p, b: F.cross_entropy(logits(p, b), ignored(b), reduction="sum"),
    "per row": lambda p, b: ((nll(p, b) * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)).mean(),
    "per row, flat": lambda p, b: (nll(p, b).flatten() / b["n"].repeat_interleave(LENGTH)).mean(),
    "batch norm": lambda p, b: F.cross_entropy(normed_logits(p, b).flatten(0, 1), b["y"].flatten()),
    "batch norm's mean": lambda p, b: norm(p, b["x"]).mean(),
    "whitened": lambda p, b: (torch.tanh(b["x"] / b["x"].std((0, 1))) @ p["w"]).square().mean(),
    "layer norm": lambda p, b: F.layer_norm(b["x"], (DIM,), p["g"]).square().mean(),
    "softmax": lambda p, b: (nll(p, b) * b["mask"].softmax(1)).mean(),
    "of parameters": lambda p, b: nll(p, b).mean() / p["w"].square().sum(),
    "of activations": lambda p, b: nll(p, b).mean() / logits(p, b).exp().sum(),
    "mse": lambda p, b: F.mse_loss(logits(p, b).unflatten(0, b["y"].shape)[..., 0], b["mask"]),
}


def step_of(loss, micros=2, **options):
    def step(p, b):
        return fp.accumulate(fp.value_and_grad(loss), num_microbatches=micros, **options)(p, b)

    return step


def lower(step, **options):
    return fp.jit(step, **options).lower(params(), batch())


def test_the_mean_of_micro_batches_is_not_that_of_the_batch():
    """What the warning is about, with numbers."""
    plain, mean = UNEVEN["masked"], EVEN["Mean"]
    want = plain(params(), batch())
    value, _ = step_of(mean)(params(), batch())
    torch.testing.assert_close(value, want)
    off, _ = step_of(plain)(params(), batch())
    assert abs(off - want) > 1e-3


@pytest.mark.parametrize("name", UNEVEN)
def test_a_denominator_that_depends_on_the_batch_is_listed(name):
    text = r"(?s)the loss.* at test_uneven_means\.py:\d+ .*2 micro-batches.*Fix: return fp\.Mean\(total, weight\)$"
    with pytest.warns(FparallelWarning, match=text.replace("the loss", "loss is divided")):
        lower(step_of(UNEVEN[name]))
    with pytest.raises(
        TraceError, match=r"(?s)strict: .*\n  at test_.*\nFix: return fp\.Mean\(total, weight\)$"
    ):
        lower(step_of(UNEVEN[name]), strict=True)


@pytest.mark.parametrize("name", EVEN)
def test_what_micro_batches_give_alike_is_not(name):
    lower(step_of(EVEN[name]), strict=True)


@pytest.mark.parametrize("name", UNEVEN)
def test_neither_is_a_sum_nor_a_whole_batch(name):
    def whole(p, b):
        return fp.value_and_grad(UNEVEN[name])(p, b)

    lower(step_of(UNEVEN[name], reduction="sum"), strict=True)
    lower(step_of(UNEVEN[name], micros=1), strict=True)
    lower(whole, strict=True)


def test_every_result_is_named_with_its_line():
    def loss(p, b):
        count = b["mask"].sum()
        aux = {
            "accuracy": ((logits(p, b).argmax(-1).view_as(b["y"]) == b["y"]) * b["mask"]).sum() / count,
            "rows": nll(p, b) / count,
            "columns": (nll(p, b) * b["mask"]).sum(0) / b["mask"].sum(0),
            "tokens": fp.Mean(count, torch.ones(())),
            "length": b["mask"].sum(1).mean(),
        }
        return nll(p, b).mean(), aux

    def step(p, b):
        return fp.accumulate(fp.value_and_grad(loss, has_aux=True), num_microbatches=4)(p, b)

    first = loss.__code__.co_firstlineno
    with pytest.warns(FparallelWarning) as found:
        lower(step)
    lines = [line for line in str(found[0].message).splitlines() if "is divided" in line]
    assert [line.split(" by a number")[0] for line in lines] == [
        f"loss: aux.accuracy is divided at test_uneven_means.py:{first + 3}",
        f"loss: aux.columns is divided at test_uneven_means.py:{first + 5}",
    ]


@pytest.mark.parametrize("name", ["masked", "in a block", "ignore_index"])
def test_evaluations_too(name):
    def step(p, b):
        return fp.accumulate(UNEVEN[name], num_microbatches=2)(p, b)

    with pytest.warns(FparallelWarning, match="its result is divided"):
        fp.jit(step).lower(params(), batch())


def test_in_a_pipeline():
    def run(plain):
        def loss(p, b):
            x = b["x"]
            for layer in p["layers"]:
                x = x + torch.tanh(x @ layer)
            error = (x.square().sum(-1) * b["mask"]).sum()
            return error / b["mask"].sum() if plain else fp.Mean(error, b["mask"].sum())

        mesh = fp.make_mesh((2, 2), ("dp", "pp"), kind="simulated")
        rules = fp.Rules({"layers": "layers"}, batch="dp", layers="pp")
        layers = [matrix(i, DIM, DIM) for i in range(2)]
        return fp.jit(step_of(loss), mesh=mesh, rules=rules).lower({"layers": layers}, batch())

    with pytest.warns(FparallelWarning, match=r"(?s)loss is divided.*Fix: return fp\.Mean"):
        run(plain=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(plain=False)
