"""Law 1: a step on a mesh equals the step on one device, in its loss, every gradient and every new leaf."""

import pytest
from hypothesis import given

import fparallel as fp
from fparallel.testing.descriptions import EXTRAS, LOSSES, OPTIMIZERS
from fparallel.testing.small_modules import MODULES
from tests.property.verdicts import check

# Each theme draws from all meshes, rules, ZeRO stages and sizes, and leans on one kind of trouble.
THEMES = {
    "mlp": fp.testing.cases(kinds=("mlp", "relu", "glu"), max_blocks=3),
    "attention": fp.testing.cases(kinds=("attention", "parallel", "glu"), losses=("ce", "mean")),
    "leaves": fp.testing.cases(kinds=("mlp",), extras=EXTRAS, optimizers=OPTIMIZERS, max_blocks=1),
    "losses": fp.testing.cases(
        kinds=("mlp", "mixer"), losses=LOSSES, masks=("random", "first", "none", "ones"), max_blocks=1
    ),
    "torch": fp.testing.cases(
        kinds=("einsum", "custom", "inplace", "slices", "vmap", "jvp", "energy", "mixer")
    ),
    "modules": fp.testing.cases(kinds=MODULES),
    "dropout": fp.testing.cases(kinds=("mlp", "glu", "attention"), dropout=True),
    "axes": fp.testing.cases(kinds=("mlp", "attention"), min_axes=3, max_axes=4, max_blocks=2),
    "microbatches": fp.testing.cases(
        kinds=("mlp", "relu", "attention", "linear"),
        losses=("ce", "mean", "means", "sum"),
        masks=("random", "first", "none"),
        extras=EXTRAS,
        dropout=True,
        microbatches=(1, 2, 3, 4),
    ),
    "pipelines": fp.testing.pipelined_cases(),
    "pipelined losses": fp.testing.pipelined_cases(
        base=fp.testing.cases(
            kinds=("mlp", "relu", "linear"),
            losses=("ce", "mean", "means", "sum"),
            masks=("random", "first", "none"),
            extras=EXTRAS,
            optimizers=OPTIMIZERS,
            max_axes=1,
            max_ranks=2,
            microbatches=(1, 2, 3),
        )
    ),
    "optimizers": fp.testing.cases(kinds=("mlp", "glu"), optimizers=OPTIMIZERS, max_blocks=1),
}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("theme", THEMES)
def test_equals_one_device(theme):
    @given(case=THEMES[theme])
    def law(case):
        check(case)

    law()


@pytest.mark.timeout(7200)
@given(case=fp.testing.whole_cases())
def test_equals_one_device_bit_for_bit_on_whole_numbers(case):
    check(case)
