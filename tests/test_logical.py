"""The text in which logical axes are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import TreeError
from fparallel.logical import UNNAMED, VARIADIC, LogicalSpec, parse_jaxtyping, parse_logical

EMBED = (("embed", None),)
QKV = ((None, 3), ("heads", None), (None, 64))


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("", ()),
        ("embed mlp", (EMBED, (("mlp", None),))),
        ("embed (3 heads 64)", (EMBED, QKV)),
        ("(3 heads 64) embed", (QKV, EMBED)),
        ("( 3 heads\t64 )embed", (QKV, EMBED)),
        ("(heads=12 head_dim)", ((("heads", 12), ("head_dim", None)),)),
        ("(embed)", (EMBED,)),
        ("embed=512", ((("embed", 512),),)),
        ("_ None _rest 3", (UNNAMED, UNNAMED, UNNAMED, ((None, 3),))),
        ("dim+1 embed", (UNNAMED, EMBED)),
        ("#embed ?embed #?embed", (EMBED, EMBED, EMBED)),
        ("... embed", (VARIADIC, EMBED)),
        ("*batch embed", (VARIADIC, EMBED)),
        ("*#batch embed", (VARIADIC, EMBED)),
    ],
)
def test_parse(text, dims):
    assert parse_logical(text) == dims


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("((a 2) b)", "nested"),
        ("(a 2", "'\\(' has no '\\)'"),
        ("a) b", "'\\)' has no '\\('"),
        ("()", "empty"),
        ("embed (a b)", "sizes of a and b unknown"),
        ("(2 _ b)", "sizes of _ and b unknown"),
        ("(0 heads)", "size 0"),
        ("(... 2)", "stands in parentheses"),
        ("... a *b", "two words"),
        ("heads=many", "no name with a size"),
    ],
)
def test_what_cannot_be_read_says_so(text, found):
    with pytest.raises(TreeError, match=f"(?s){found}.*\nFix: "):
        parse_logical(text)


def test_jaxtyping_text_has_no_parentheses():
    with pytest.raises(
        TreeError, match=r'Fix: .*Annotated\[Float\[Tensor, "embed qkv"\], "embed \(3 heads 64\)"\]'
    ):
        parse_jaxtyping("embed (3 heads 64)")
    assert parse_jaxtyping("#embed *batch") == (EMBED, VARIADIC)


@pytest.mark.parametrize(("ndim", "fits"), [(1, False), (2, True), (3, False)])
def test_named_dims_fit_one_number_of_dims(ndim, fits):
    spec = LogicalSpec(parse_logical("embed mlp"))
    assert spec.fits(ndim) is fits
    assert spec.for_ndim(ndim) is spec


@pytest.mark.parametrize(
    ("ndim", "fits", "text"), [(1, False, "a b"), (2, True, "a b"), (4, True, "a _ _ b")]
)
def test_variadic_dims_take_what_is_left(ndim, fits, text):
    spec = LogicalSpec(parse_logical("a ... b"))
    assert spec.fits(ndim) is fits
    assert spec.for_ndim(ndim).dims == parse_logical(text)


def test_a_spec_prints_as_its_text_and_knows_its_names():
    spec = LogicalSpec(parse_logical("embed (3 heads 64) ... _"), (("layers", 3, 12),))
    assert str(spec) == "embed (3 heads 64) ... _ of layers 3/12"
    assert spec.names == {"embed", "heads", "layers"}


names = st.one_of(st.none(), st.sampled_from(["embed", "mlp", "heads", "kv_2", "Vocab"]))
sized = st.tuples(names, st.integers(1, 99))
plain = st.tuples(st.tuples(names, st.one_of(st.none(), st.integers(0, 99))))
composite = st.builds(
    lambda known, free, at: (*known[:at], (free, None), *known[at:]),
    st.lists(sized, min_size=1, max_size=3).map(tuple),
    names,
    st.integers(0, 3),
)


@given(st.lists(st.one_of(plain, composite, st.lists(sized, min_size=2).map(tuple))).map(tuple))
def test_printing_and_parsing_are_inverse(dims):
    assert parse_logical(str(LogicalSpec(dims))) == dims
