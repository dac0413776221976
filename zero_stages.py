"""What every package imports first: is `common` ours? A project may have a folder of that name, too."""

import importlib.util
from pathlib import Path

import common

HERE = Path(__file__).resolve().parent


def check(*packages):
    """Look where Python finds these packages.

    Raises:
        ImportError: another file or folder of that name comes first.
    """
    for name in packages:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin or next(iter(spec.submodule_search_locations)))  # a folder without __init__.py
        if found.resolve() != HERE / name / "__init__.py":
            raise ImportError(
                f"{name!r} is {found} here, and hides {HERE / name}, which is needed: rename yours, or take an engine "
                f"as a package of your own: `cd {HERE} && python -m interop.take stage3_param YOUR_FOLDER/zero3`"
            )


check("common")
__version__ = common.__version__
