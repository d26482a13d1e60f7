"""Where in a model's code something happens: lines of errors and of the running code."""

import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch

_PYTHON = sysconfig.get_paths()["stdlib"]


def is_torch_code(code: CodeType) -> bool:
    """Whether code is of torch itself."""
    return code.co_filename.startswith(str(Path(torch.__file__).parent))


def is_model_code(code: CodeType) -> bool:
    """Whether code is neither torch's, nor fxpipe's, nor of Python itself."""
    name = code.co_filename
    own = not name.startswith(_PYTHON) or "site-packages" in name
    return own and "/sympy/" not in name and _is_foreign(code)


def calling_line(error: BaseException | None = None) -> str:
    """`file:line` of the innermost code outside of torch: of an error, or of the caller."""
    if error is not None:
        walked = list(traceback.walk_tb(error.__traceback__))
    else:
        walked = list(traceback.walk_stack(sys._getframe()))[::-1]
    names = [f"{f.f_code.co_filename}:{line}" for f, line in walked if _is_foreign(f.f_code)]
    return names[-1] if names else "unknown"


def calling_frames() -> list[FrameType]:
    """The frames of the running code that is neither torch's nor fxpipe's, innermost first."""
    walked = traceback.walk_stack(sys._getframe())
    return [frame for frame, _ in walked if _is_foreign(frame.f_code)]


def _is_foreign(code: CodeType) -> bool:
    own = str(Path(__file__).parent)
    return not is_torch_code(code) and not code.co_filename.startswith(own)
