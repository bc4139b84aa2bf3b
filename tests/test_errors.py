"""Errors say what was found, where, and how to fix it."""

import pickle

import pytest

from fparallel import errors
from fparallel.errors import ExecutionError, FparallelError, FparallelWarning, TreeError, did_you_mean

EVERY_ERROR = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, FparallelError)
]


def test_a_message_ends_with_the_fix():
    error = TreeError("two trees differ", fix="pass trees of one structure")
    assert str(error) == "two trees differ\nFix: pass trees of one structure"


def test_a_message_names_the_place():
    error = TreeError("two trees differ", fix="pass trees of one structure", where="params.up")
    assert str(error) == "two trees differ\n  at params.up\nFix: pass trees of one structure"


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_error_is_one_of_ours_and_survives_pickling(kind):
    error = pickle.loads(pickle.dumps(kind("found", fix="do", where="here")))
    assert type(error) is kind
    assert str(error) == "found\n  at here\nFix: do"


@pytest.mark.parametrize("kind", [k for k in EVERY_ERROR if k not in (FparallelError, ExecutionError)])
def test_a_mistake_of_the_user_is_a_value_error(kind):
    with pytest.raises(ValueError, match="found"):
        raise kind("found", fix="do")


def test_a_failure_at_run_time_is_not_a_value_error():
    assert not issubclass(ExecutionError, ValueError)
    assert issubclass(ExecutionError, RuntimeError)


def test_the_fix_is_required():
    with pytest.raises(TypeError, match="fix"):
        TreeError("found")


def test_the_warning_is_a_user_warning():
    assert issubclass(FparallelWarning, UserWarning)


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("embde", ["mlp", "embed"], "did you mean 'embed'?"),
        ("zzz", ["mlp", "embed"], "known: 'embed', 'mlp'"),
        ("zzz", [], "none are known"),
        (
            "zzz",
            [f"n{i:02}" for i in range(14)],
            "known: " + ", ".join(f"'n{i:02}'" for i in range(12)) + " and 2 more",
        ),
    ],
)
def test_did_you_mean(name, known, said):
    assert did_you_mean(name, known) == said
