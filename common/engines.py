"""The engines by name."""

import importlib
import importlib.util
import inspect

from common.errors import InputError

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
ENGINES = (*STAGES, "offload", "offload.nvme", "zeropp", "zeropp.hybrid")
HERE = __name__.removesuffix("common.engines")  # empty here; "my_project.zero." in a copy by `interop.take`


def find_engine(name):
    """A package's class Engine, or the class `package.module:Name`. Raises InputError if there is none."""
    path, _, attribute = name.partition(":")
    path = HERE + path if name in ENGINES else path
    try:
        found = importlib.util.find_spec(path.partition(".")[0]) and importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(error.name):  # a failed import inside the module
            raise
        found = None
    if not inspect.isclass(getattr(found, attribute or "Engine", None)):
        raise InputError(
            f"unknown engine {name!r}; known engines: {', '.join(ENGINES)}; name a class of your own "
            "package.module:Name, and have the module in this folder or along PYTHONPATH"
        )
    return getattr(found, attribute or "Engine")
