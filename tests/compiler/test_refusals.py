"""What a step cannot do is refused before anything runs: the message names the user's line and a fix."""

import pytest
import torch
import torch.nn.functional as F

import fparallel as fp
from fparallel import P
from fparallel.errors import FparallelError
from tests.compiler.sharded import real, simulated, whole

MESH = simulated(x=2)


def train_batch_norm(x):
    mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    return F.batch_norm(x, mean, var, training=True)


REFUSED = {
    "complex result": (lambda x: torch.fft.fft(x), "complex tensor"),
    "shape depends on data": (lambda x: x[x > 0], "depends on data"),
    "branch on data": (lambda x: x if x.sum() > 0 else -x, "reads the value"),
    "value read": (lambda x: x * x.max().item(), "reads the value"),
    "sizes read from data": (lambda x: torch.tensor_split(x, torch.tensor([1, 2])), "reads the value"),
    "global random state": (lambda x: x + torch.randn_like(x), "global random state"),
    "strides of an intermediate": (lambda x: (x + 1).as_strided((2,), (1,)), "as_strided"),
    "write into an argument": (lambda x: x.add_(1), "in place"),
    "running statistics": (train_batch_norm, "in place"),
    "control flow": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        "operator cond",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fn, message = REFUSED[name]
    with pytest.raises(FparallelError, match=message) as error:
        fp.jit(fn, mesh=MESH, in_shardings=(P("x"),)).lower(whole(0, 4, 3))
    assert "\nFix: " in str(error.value)
    assert "test_refusals.py:" in str(error.value)


def test_complex_values_inside_a_step_are_fine():
    def smooth(x):
        return torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1])

    x = real(0, 4, 6)
    out = fp.jit(smooth, mesh=MESH, in_shardings=(P("x"),))(x)
    torch.testing.assert_close(fp.device_get(out), smooth(x), rtol=1e-12, atol=1e-12)
