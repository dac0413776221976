"""`python -m common.take stage3_param my_project/zero3`: one engine as a package of your own, to read and to change.

The package has the engine, the modules of `common/` that it imports, with relative imports, and the licence. So it
needs nothing of this repository, and no other `common` is in its way:

    from my_project.zero3 import Engine

VERDICT.txt beside it says how the suite's quick part judged this very copy: `--no-verdict` saves the minute.
"""

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import common
from common.errors import InputError
from common.measure.hardware import commit
from common.outputs import ROOT, check_clone, one_line_errors, parser_of
from common.train import ENGINES, find_engine

GUARD = "zero_stages"  # looks whose `common` there is; a taken engine has its own
INIT = '''"""{engine}, taken from zero-stages {version}: see LICENSE. {docstring}"""

from .{module} import {named}

__all__ = ["Engine"]
Engine.reduces_at_once = {reduces_at_once}  # each backward, under no_sync too: what the suite holds it to
'''
SILENT = ("stage0_ddp", "stage1_os")  # under no_sync


def main(arguments=None):
    """Parse the arguments, copy, have the copy judged, and say what was written."""
    parser = parser_of("common.take", __doc__)
    parser.add_argument("engine", help=", ".join(ENGINES))
    parser.add_argument("package", type=Path, help="the folder to write, which is not there yet: a name for imports")
    parser.add_argument("--no-verdict", action="store_true", help="do not run the suite's quick part on it")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check(options.engine, options.package)
        if not options.no_verdict:
            check_clone("tests/any_engine", ", or give --no-verdict")
        files = take(options.engine, options.package)
    lines = sum(len(file.read_text().splitlines()) for file in files)
    print(f"{options.package}: {options.engine} in {len(files)} files, {lines:,} lines")
    if not options.no_verdict:
        passed = judge(options.package)
        print(f"{options.package / 'VERDICT.txt'}: {passed}")


def check(engine, package):
    """Refuse what cannot be taken, or not there.

    Raises:
        InputError: it says which.
    """
    if engine not in ENGINES:
        raise InputError(f"{engine}: give one of {', '.join(ENGINES)}")
    if not package.name.isidentifier():
        raise InputError(f"{package}: {package.name!r} cannot be imported; give a name of letters, digits and _")
    if package.exists():
        raise InputError(f"{package} is there already; give a folder that is not")
    if not package.parent.is_dir():
        raise InputError(f"{package}: there is no folder {package.parent}; make it first")


def take(engine, package):
    """Write the package; return its files.

    Args:
        engine: one of ENGINES.
        package: a Path.
    """
    found = find_engine(engine)
    module = found.__module__
    files = needed(module)
    written = []
    for file in sorted(files):
        place = package / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(relative(file, files))
        written.append(place)
    (package / "LICENSE").write_text(licence())
    docstring = (found.__doc__ or "").split("\n")[0]
    named = "Engine" if found.__name__ == "Engine" else f"{found.__name__} as Engine"
    version = f"{common.__version__} {commit()}".strip()
    about = {"docstring": docstring, "module": module, "named": named, "reduces_at_once": engine not in SILENT}
    said = INIT.format(engine=engine, version=version, **about)
    (package / "__init__.py").write_text(said)
    return [package / "__init__.py", *written]


def licence():
    """The licence's text: in a clone a file beside the packages, else in what pip noted of them."""
    if (ROOT / "LICENSE").exists():
        return (ROOT / "LICENSE").read_text()
    return importlib.metadata.distribution("zero-stages").read_text("licenses/LICENSE")


def needed(module):
    """The files that a module imports, however far, itself and the packages above included."""
    found, waiting = set(), [module]
    while waiting:
        parts = waiting.pop().split(".")
        for depth in range(1, len(parts) + 1):
            for file in files_of(".".join(parts[:depth])):
                if file not in found and file.stem != GUARD and not is_above(file, module):
                    found.add(file)
                    waiting += [name for node in imports(file) for name in names_in(node)]
    return found


def is_above(file, module):
    """Whether it is the `__init__` of the engine's own package, which may import its neighbours: not taken."""
    return file == ROOT / module.partition(".")[0] / "__init__.py"


def files_of(name):
    """The file of a module or package of this repository, in a list; an empty one where it is none."""
    place = ROOT / name.replace(".", "/")
    return [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()]


def imports(file):
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]


def names_in(node):
    """What an import may name: modules, and what may be modules within."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def relative(file, files):
    """The text of a file, in which what it imports of `files` is named from where it stands."""
    lines = file.read_text().splitlines(keepends=True)
    dots = "." * len(file.relative_to(ROOT).parts)
    for node in imports(file):
        line = lines[node.lineno - 1]
        if isinstance(node, ast.ImportFrom) and files & set(files_of(node.module)):
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{node.module} import", 1)
        elif isinstance(node, ast.Import) and (ROOT / node.names[0].name).is_dir():
            lines[node.lineno - 1] = line.replace("import ", f"from {dots} import ", 1)
    return "".join(line for line in lines if GUARD not in line)


def judge(package):
    """Run the suite's quick part on the package; write what it says beside it, and return its verdict, a line."""
    environment = {**os.environ, "PYTHONPATH": str(package.absolute().parent)}
    suite = [sys.executable, "-m", "pytest", "tests", "--engine", f"{package.name}:Engine", "--quick", "--no-header"]
    ended = subprocess.run([*suite, "-q"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = f"{ended.stdout}{ended.stderr}"
    (package / "VERDICT.txt").write_text(f"$ {' '.join(suite[1:])}\n{said}")
    lines = said.strip().splitlines()
    return next((line for line in lines if " trainings end " in line), lines[-1])


if __name__ == "__main__":
    main()
