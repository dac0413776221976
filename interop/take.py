"""`python -m interop.take stage3_param my_project/zero3`: an engine as a package of your own, to read and to change.

The package has the engine, the modules of `common/` that it imports, with relative imports, and the licence. So it
needs nothing from this repository, and does not conflict with another `common`:

    from my_project.zero3 import Engine

`python -m interop.take words my_project/zero` takes the APIs of other libraries, with all engines behind them:

    from my_project.zero.interop import deepspeed

VERDICT.txt next to an engine has the verdict of the suite's quick part on this copy: `--no-verdict` saves the minute.
"""

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import common
from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.measure.hardware import commit
from common.outputs import ROOT, check_clone, one_line_errors, parser_of

GUARD = "zero_stages"  # looks whose `common` there is; a taken engine has its own
WORDS = "words"
EXPORTS = """
from .{module} import {named}

__all__ = ["Engine"]
Engine.reduces_at_once = {reduces_at_once}  # each backward, under no_sync too: what the suite holds it to
"""
ALONE = ("accelerate.py", "fabric.py", "lightning.py", "transformers.py")
LIBRARIES = ("deepspeed/**/*.py", "fsdp/*.py", *ALONE)  # in interop/
OPTIMIZERS = "common.optim"  # which no engine imports
SILENT = ("stage0_ddp", "stage1_os")  # under no_sync


def main(arguments=None):
    """Parse the arguments, copy, test the copy, and say what was written."""
    parser = parser_of("interop.take", __doc__)
    parser.add_argument("engine", help=", ".join((*ENGINES, WORDS)))
    parser.add_argument("package", type=Path, help="the new folder, whose name is the package's")
    parser.add_argument("--no-verdict", action="store_true", help="do not run the suite's quick part on it")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check(options.engine, options.package)
        judged = options.engine != WORDS and not options.no_verdict
        if judged:
            check_clone("tests/any_engine", ", or give --no-verdict")
        files = take(options.engine, options.package)
    lines = sum(len(file.read_text().splitlines()) for file in files)
    print(f"{options.package}: {options.engine} in {len(files)} files, {lines:,} lines")
    if judged:
        passed = judge(options.package)
        print(f"{options.package / 'VERDICT.txt'}: {passed}")


def check(engine, package):
    """Refuse an unknown engine, or a package that cannot be written or imported."""
    if engine not in (*ENGINES, WORDS):
        raise InputError(f"{engine}: give one of {', '.join(ENGINES)}, or {WORDS}")
    if not package.name.isidentifier():
        raise InputError(f"{package}: {package.name!r} cannot be imported; give a name of letters, digits and _")
    if package.exists():
        raise InputError(f"{package} is there already; give a new folder")
    if not package.parent.is_dir():
        raise InputError(f"{package}: there is no folder {package.parent}; make it first")


def take(engine, package):
    """Write the package, a Path, of one of ENGINES or of WORDS; return its files."""
    files, about, exports = of_words() if engine == WORDS else of_engine(engine)
    written = []
    for file in sorted(files):
        place = package / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(relative(file, files))
        written.append(place)
        for table in filter(Path.exists, (file.with_suffix(".json"), file.with_suffix(".toml"))):  # which it reads
            written.append(place.with_suffix(table.suffix))
            written[-1].write_text(table.read_text())
    (package / "LICENSE").write_text(licence())
    version = f"{common.__version__} {commit()}".strip()
    said = f'"""{engine}, taken from zero-stages {version}: see LICENSE. {about}"""\n{exports}'
    (package / "__init__.py").write_text(said)
    return [package / "__init__.py", *written]


def of_engine(name):
    """The files of an engine, what it is in a sentence, and what the package exports, as code."""
    found = find_engine(name)
    own = ROOT / found.__module__.partition(".")[0] / "__init__.py"  # may import its neighbours: not taken
    named = "Engine" if found.__name__ == "Engine" else f"{found.__name__} as Engine"
    exports = EXPORTS.format(module=found.__module__, named=named, reduces_at_once=name not in SILENT)
    return needed(found.__module__, OPTIMIZERS, without=own), (found.__doc__ or "").split("\n")[0], exports


def of_words():
    """The same for all APIs of other libraries, with the engines that they find by name."""
    files = [file.relative_to(ROOT) for place in LIBRARIES for file in (ROOT / "interop").glob(place)]
    modules = [".".join(file.with_suffix("").parts) for file in files]
    return needed(*ENGINES, OPTIMIZERS, *modules), "Import what is in interop/.", ""


def licence():
    """The licence's text: in a clone a file next to the packages, otherwise in pip's metadata."""
    if (ROOT / "LICENSE").exists():
        return (ROOT / "LICENSE").read_text()
    return importlib.metadata.distribution("zero-stages").read_text("licenses/LICENSE")


def needed(*modules, without=None):
    """The files that modules import, however far, with themselves and their packages; one may be left out."""
    found, waiting = set(), list(modules)
    while waiting:
        parts = waiting.pop().split(".")
        for depth in range(1, len(parts) + 1):
            for file in files_of(".".join(parts[:depth])):
                if file not in found and file.stem != GUARD and file != without:
                    found.add(file)
                    waiting += [name for node in imports(file) for name in names_in(node)]
    return found


def files_of(name):
    """The file of a module or package of this repository, in a list; an empty one if it is none."""
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
    """The text of a file, with relative imports of what it imports from `files`."""
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
    """Run the suite's quick part on the package; write its output into VERDICT.txt, and return its last line."""
    environment = {**os.environ, "PYTHONPATH": str(package.absolute().parent)}
    suite = [sys.executable, "-m", "pytest", "tests", "--engine", f"{package.name}:Engine", "--quick", "--no-header"]
    ended = subprocess.run([*suite, "-q"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = f"{ended.stdout}{ended.stderr}"
    (package / "VERDICT.txt").write_text(f"$ {' '.join(suite[1:])}\n{said}")
    lines = said.strip().splitlines()
    return next((line for line in lines if " trainings end " in line), lines[-1])


if __name__ == "__main__":
    main()
