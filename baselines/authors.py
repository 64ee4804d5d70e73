"""Code of other authors, run from a checkout that the user names.

Invariant: none of it is in this repository; the module that is asked for lies in that checkout and
in no other; the search path is as it was afterwards.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from baselines.options import text
from baselines.system import Unsupported


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckoutOptions:
    """Options of a system that is run from a checkout."""

    preset: str | None = text("a word")
    """Label of the settings in rows and figures; it changes nothing."""
    checkout: str | None = text("the path of a clone")
    """Folder of a clone of the authors' repository, or one that it lies in."""


def checked(checkout: str | None, repository: str, file: str) -> Path:
    """The clone of `repository` (OWNER/NAME on GitHub), by a file that it has: the checkout itself,
    or a folder NAME in it. Unsupported, in one line, where there is none."""
    given = Path(checkout or "").expanduser().resolve()
    for path in (given, given / repository.partition("/")[2]) if checkout else ():
        if (path / file).is_file():
            return path
    raise Unsupported(
        f"machine.checkout: got {checkout or 'nothing'}, allowed the folder of a clone of "
        f"github.com/{repository}; clone it and give machine.checkout=PATH"
    )


def imported(checkout: Path, module: str, code: str) -> Any:
    """A module of this checkout and of no other; Unsupported for what it lacks. code: what messages
    call it."""
    sys.path.insert(0, str(checkout))
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"{code} does not import ({' '.join(str(error).split())}); install what it needs"
        ) from None
    finally:
        sys.path.remove(str(checkout))
    file = Path(found.__file__ or "").resolve()
    folder = file.parent.parent if hasattr(found, "__path__") else file.parent
    if checkout not in file.parents:
        raise Unsupported(
            f"machine.checkout: got {checkout}, but {module} of {folder} was imported before"
        )
    return found
