"""The flags: what they mean for mesh, rules, model and optimizer, and which of them mean nothing."""

import pytest
import torch

import fparallel as fp
from fparallel.cli.main import Lower, Train, _parse
from fparallel.cli.options import Options, UsageError
from fparallel.errors import DataError, FparallelError, MeshError, ShardingError
from fparallel.models import gpt, llama


def rules_of(**flags) -> dict:
    """Logical name to mesh axes, as the rules were asked for."""
    seen: dict = {}

    class Rules:
        def __init__(self, **logical):
            seen.update(logical)

        def zero(self, stage, *, axis):
            seen["zero"] = (stage, axis)
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp, "Rules", Rules, raising=False)
        Options(**flags).make_rules()
    return seen


def test_every_flag_of_the_command_line_is_read():
    line = (
        "--mesh dp=4,tp=2 --zero 1 --steps 7 --batch 16 --seq 64 --layers 3 --dim 96 --heads 6 --lr 0.1 "
        "--seed 5 --data x.txt --simulate --compile inductor --out there --check 2 --json --model llama "
        "--kv-heads 2 --optimizer lion --microbatches 2"
    )
    options = _parse(["train", *line.split()])
    assert isinstance(options, Train)
    assert options == Train(
        mesh="dp=4,tp=2",
        zero=1,
        steps=7,
        batch=16,
        seq=64,
        layers=3,
        dim=96,
        heads=6,
        lr=0.1,
        seed=5,
        data="x.txt",
        simulate=True,
        compile="inductor",
        out="there",
        check=2,
        json=True,
        model="llama",
        kv_heads=2,
        optimizer="lion",
        microbatches=2,
    )
    assert isinstance(_parse(["lower", *line.split()]), Lower)


@pytest.mark.parametrize("name", ["--dtype", "--check-dtype"])
def test_float64_has_two_names(name):
    assert _parse(["train", name, "float64"]).torch_dtype == torch.float64


@pytest.mark.parametrize("line", [["train", "--zero", "4"], ["train", "--nope"], ["trains"], []])
def test_what_is_no_flag_ends_with_a_usage_message(line, capsys):
    with pytest.raises(SystemExit) as stop:
        _parse(line)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_meshes():
    assert Options(mesh="dp=2,tp=4").mesh_shape == {"dp": 2, "tp": 4}
    assert list(Options(mesh=" tp = 4 , dp=2").mesh_shape) == ["tp", "dp"]
    assert Options(mesh="dp=256,tp=8").num_ranks == 2048


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=", "dp=two", "dp=0", "dp=-1", "dp=2,", "dp=2,dp=2", "2=dp", "dp=2;tp=2"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(MeshError, match="cannot read") as error:
        _ = Options(mesh=text).mesh_shape
    assert str(error.value).endswith("Fix: write --mesh dp=2,tp=2")


def test_the_batch_grows_with_the_data_parallel_ranks_unless_given():
    assert Options(mesh="dp=2,tp=2").batch_size == 16
    assert Options(mesh="dp=256,tp=8").batch_size == 2048
    assert Options(mesh="tp=2").batch_size == 8
    assert Options(mesh="dp=2", batch=3).batch_size == 3


def test_the_mesh_axes_imply_the_rules():
    tensor = {"heads": "tp", "mlp": "tp", "vocab": "tp"}
    assert rules_of(mesh="dp=2,tp=2") == {"batch": "dp", **tensor, "zero": (3, "dp")}
    assert rules_of(mesh="dp=4", zero=0) == {"batch": "dp"}
    assert rules_of(mesh="dp=4", zero=1) == {"batch": "dp", "zero": (1, "dp")}
    assert rules_of(mesh="tp=4") == tensor
    assert rules_of(mesh="dp=2,tp=2", rules="seq=tp,vocab=none,mlp=dp*tp") == {
        "batch": "dp",
        "heads": "tp",
        "mlp": ("dp", "tp"),
        "vocab": None,
        "seq": "tp",
        "zero": (3, "dp"),
    }


def test_key_value_heads_are_sharded_over_tp_however_few_they_are():
    assert rules_of(mesh="tp=2", model="llama", heads=8, kv_heads=4)["kv_heads"] == "tp"
    assert rules_of(mesh="tp=4", model="llama", heads=8, kv_heads=2)["kv_heads"] == "tp"
    assert "kv_heads" not in rules_of(mesh="tp=2", model="gpt")


@pytest.mark.parametrize(
    ("flags", "error", "found"),
    [
        ({"mesh": "x=2"}, MeshError, "no rule shards anything over 'x'"),
        ({"mesh": "tp=2", "zero": 1}, MeshError, "--zero 1 without a dp axis"),
        ({"rules": "seq"}, ShardingError, "cannot read 'seq'"),
        ({"rules": "seq="}, ShardingError, "cannot read 'seq='"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(flags, error, found):
    with pytest.raises(error, match=found) as caught:
        rules_of(**flags)
    assert str(caught.value).splitlines()[-1].startswith("Fix: ")


def test_an_axis_of_any_name_can_be_given_a_meaning():
    assert rules_of(mesh="x=2", rules="batch=x") == {"batch": "x"}


@pytest.mark.parametrize(
    ("flags", "error", "found"),
    [
        ({"steps": 0}, UsageError, "--steps 0"),
        ({"eval_every": 0}, UsageError, "--eval-every 0"),
        ({"check": -1}, UsageError, "--check -1"),
        ({"kv_heads": 2}, UsageError, "--kv-heads needs grouped-query attention"),
        ({"batch": 1}, DataError, "a batch of 1 over dp=2 leaves ranks idle"),
        ({"batch": 0, "mesh": "tp=2"}, DataError, "a batch of 0"),
        ({"microbatches": 0}, UsageError, "--microbatches 0"),
        ({"batch": 20, "microbatches": 4}, DataError, "(?s)each of 4 micro-batches on 2.*--batch 16 or 24"),
        ({"lr": -1.0}, UsageError, "--lr -1.0"),
        ({"clip": float("nan")}, UsageError, "--clip nan"),
    ],
)
def test_values_that_mean_nothing_are_refused(flags, error, found):
    with pytest.raises(error, match=found) as caught:
        Options(**flags).check_values()
    assert isinstance(caught.value, FparallelError)
    assert str(caught.value).splitlines()[-1].startswith("Fix: ")


def test_the_model_is_the_one_asked_for():
    assert Options(layers=3, dim=96, heads=6, seq=50).model_config == gpt.Config(
        seq=50, layers=3, dim=96, heads=6
    )
    wanted = llama.Config(layers=3, dim=96, heads=6, kv_heads=2)
    assert Options(model="llama", layers=3, dim=96, heads=6, kv_heads=2).model_config == wanted


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_learning_rate_warms_up_and_decays(name):
    options = Options(optimizer=name, lr=1.0, warmup=2, steps=10, weight_decay=0.0, clip=0.0)
    tx, params = options.make_optimizer(), {"w": torch.zeros(1)}
    state, sizes = tx.init(params), []
    for _ in range(10):
        updates, state = tx.update({"w": torch.full((1,), 1e-3)}, state, params)
        sizes.append(float(updates["w"].abs()))
    assert sizes[0] == 0 and sizes[1] < sizes[2]
    if name != "sgd":
        assert sizes[2] == pytest.approx(1, rel=1e-4) and sizes[-1] < 0.2


def test_warmup_may_be_longer_than_the_run_or_none():
    for flags in ({"warmup": 0}, {"warmup": 100}, {"warmup": 0, "steps": 1}):
        tx, params = Options(**{"steps": 5, **flags}).make_optimizer(), {"w": torch.zeros(1)}
        updates, _ = tx.update({"w": torch.ones(1)}, tx.init(params), params)
        assert torch.isfinite(updates["w"]).all()
