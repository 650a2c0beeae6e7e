"""The training function of a launch, where ranks find it: also if it was typed into a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.common.cells import is_typed_in, module_of
from paceline.common.files import write_private
from paceline.common.reference import Reference, check_name, refer_to
from paceline.errors import UsageError
from paceline.launcher.spec import LaunchSpec

FILE = "from_notebook.py"
"""What a function of a notebook is written to, in the folder of the run."""


@contextmanager
def reference_of(spec: LaunchSpec) -> Iterator[Reference]:
    """The reference of the training function, which ranks find in the meantime."""
    train = spec.train
    if isinstance(train, dict):
        yield train
    elif not is_typed_in(train):
        yield refer_to(train)
    else:
        name = check_name(train)
        if spec.on is not None or spec.many_hosts is not None:
            raise UsageError(
                f"{name} must be in a file that all hosts have, not in a notebook of one of them"
            )
        source = module_of(train)
        with (
            TemporaryDirectory(prefix="paceline-")
            if spec.folder is None
            else nullcontext(spec.folder) as folder
        ):
            path = Path(folder).resolve() / FILE
            write_private(path, source)
            yield {"script": str(path), "name": name}
