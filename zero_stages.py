"""What every engine's package imports first: is `common` ours? A project may have a folder of that name, too."""

from pathlib import Path

import common

OURS = Path(__file__).resolve().with_name("common")
found = Path(common.__file__ or next(iter(common.__path__)))  # a folder without __init__.py has no file

if found.resolve() != OURS / "__init__.py":
    raise ImportError(
        f"'common' is {found} here, and hides {OURS}, which the engines need: rename yours, or take an engine as a "
        f"package of your own, by `cd {OURS.parent} && python -m common.take stage3_param YOUR_FOLDER/zero3` (or words)"
    )

__version__ = common.__version__
