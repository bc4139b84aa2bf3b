"""Where in the user's source something happens, found in the frames of the stack: lines, variables, what failed."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

import torch
from torch import Tensor

from fparallel._compat import DataDependentOutputException, DynamicOutputShapeException
from fparallel.errors import TraceError

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN_MODELS = os.path.join(_OWN, "models") + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SITE = os.path.dirname(os.path.dirname(torch.__file__))
_LIBRARIES = tuple(
    os.path.join(_SITE, name) + os.sep for name in ("einops", "optree", "jaxtyping", "beartype")
)


@functools.cache
def is_user_file(name: str) -> bool:
    """Whether a source file is the user's: neither torch's, Python's nor fparallel's (its models count as a user's)."""
    if name.startswith(_OWN_MODELS):
        return True
    if name.startswith(("<", _OWN, _TORCH, *_LIBRARIES)):
        return False
    return "site-packages" in name or not name.startswith(_STDLIB)


def user_line() -> str:
    """`file.py:12` of the innermost frame that is neither torch's, Python's nor fparallel's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """The innermost user line of a traceback."""
    line, trace_ = "", error.__traceback__
    while trace_ is not None:
        name = trace_.tb_frame.f_code.co_filename
        if is_user_file(name):
            line = f"{os.path.basename(name)}:{trace_.tb_lineno}"
        trace_ = trace_.tb_next
    return line


def variable_of(tensor: Tensor) -> str:
    """The variable of a user's frame that holds a tensor."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            for scope in (frame.f_locals, frame.f_globals):
                for name, held in list(scope.items()):
                    if held is tensor:
                        return f"the variable {name!r}"
        frame = frame.f_back
    return "a variable"


def explain(error: Exception) -> Exception:
    """A TraceError for what fake tensors cannot do; other exceptions are the user's own and pass unchanged."""
    text = str(error)
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in text:
        name = text.partition("HigherOrderOperator ")[2].split(" ")[0]
        return TraceError(
            f"the step uses the control flow operator {name}, which cannot be sharded",
            fix="use torch.where, a Python loop of fixed length, or torch.func.vmap",
            where=error_line(error),
        )
    unread = any(
        t in text.lower()
        for t in ("data is not allocated yet", "data-dependent", ".numpy() is not supported")
    )
    if (
        "guard" in type(error).__name__.lower()
        or unread
        or isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    ):
        line = error_line(error)
        return TraceError(
            "the step reads the value of a traced tensor (.item(), float(), bool(), or an `if` on it)",
            fix="keep the value a tensor: use torch.where instead of `if`, and return it instead of reading it",
            where=line,
        )
    return error
