"""Write what students get: this repository without solutions, and an autograder for Gradescope.

    python -m course.release --out results/local/student

The tree is what git tracks, less what shows a solution. A link to its exercise replaces each stage's engine: once that
is solved, the stage's commands and the notebooks run as they do here, and there is one file to write in and to hand in.
A later exercise shows no answers of an earlier one: those methods are missing there as well. The pages in
minimal.py are missing too, as notebooks ask for them; so are sources that a notebook printed.

The grader in the tree holds submissions to recorded promises, see `course.grader.promises`. The autograder is all that
git tracks, with the two scripts that Gradescope calls: it has the engines, as the later exercises need them.
"""

import ast
import contextlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from common.errors import InputError
from common.outputs import ROOT, one_line_errors, parser_of
from course.exercises import EXERCISES, apart
from course.grader.graded import Worlds
from course.grader.promises import PROMISES, record
from course.parts import written

NAME, GRADER = "zero-student", "zero-grader"
HERE = Path(__file__).parent.relative_to(ROOT)
# Engines that hold methods of the exercises, what shows them, and what needs those.
LEFT_OUT = (
    *("offload/", "zeropp/", "lab/offload/", "lab/zeropp/", "tests/", "course/lessons/"),
    *(".ci/", ".github/", "Makefile", "CONTRIBUTING.md", "CITATION.cff", "README.md"),
    *("notebooks/exercises/", f"{HERE}/"),
    *(f"{exercise.package}/{file}" for exercise in EXERCISES for file in ("engine.py", "minimal.py")),
)
PAGE = '"""To be written in a notebook: what notebooks/0{number}_*.ipynb builds, under these names."""\n'
OPEN = '\n\ndef {name}(*arguments):\n    raise NotImplementedError("{package}/minimal.py: {name} is still open")\n'


def main(argv=None):
    """Parse the arguments, write the tree, its archive and the bundle, and name them."""
    parser = parser_of("course.release", __doc__)
    parser.add_argument("--out", default="results/local/student", help="a folder (default: %(default)s)")
    options = parser.parse_args(argv)
    with one_line_errors():
        try:
            made = release(Path(options.out))
        except OSError as error:
            raise InputError(f"--out {options.out}: it cannot be written there ({error}); give a folder") from error
    for path in made:
        print(path)


def release(out):
    """Write the tree, its archive, and the autograder, into a folder; return the three paths.

    Raises:
        InputError: this is no checkout of git, or the engines cannot be trained here.
        OSError: a file cannot be written.
    """
    tree, archive, bundle = out / NAME, out / f"{NAME}.tar.gz", out / "autograder.zip"
    names = tracked()
    shutil.rmtree(tree, ignore_errors=True)
    copy_files(names, tree)
    write_exercises(tree)
    with tempfile.NamedTemporaryFile() as log, contextlib.closing(Worlds(log.name)) as worlds:
        record(worlds.run, tree / PROMISES.relative_to(ROOT))  # what the grader in the tree holds submissions to
    with tarfile.open(archive, "w:gz") as file:
        file.add(tree, NAME)
    write_bundle(names, bundle)
    return tree, archive, bundle


def tracked():
    """The paths that git tracks, from the repository's root on."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(
            "a release is made of what git tracks: run it in a checkout, where git is installed"
        ) from error
    return listed.strip("\0").split("\0")


def copy_files(names, tree):
    """These files, less what is left out, and the page that the tree opens with."""
    for name in names:
        if not name.startswith(LEFT_OUT):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    for notebook in tree.glob("notebooks/*.ipynb"):
        notebook.write_text(without_sources(notebook.read_text()))
    shutil.copy(ROOT / HERE / "students.md", tree / "README.md")


def without_sources(text):
    """A notebook's text without the sources that its cells printed, which may be solutions."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if "inspect.getsource" in "".join(cell["source"]):
            cell["outputs"] = []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write_exercises(tree):
    """Write exercises that give away nothing of each other, links to them as engines, and minimal pages to fill."""
    for number, exercise in enumerate(apart(EXERCISES), 1):
        file, package = tree / exercise.path.relative_to(ROOT), tree / exercise.package
        file.parent.mkdir(exist_ok=True)
        file.write_text(written(exercise))
        (package / "engine.py").symlink_to(os.path.relpath(file, package))
        (package / "minimal.py").write_text(page_to_write(exercise.package, number))


def page_to_write(package, number):
    """A minimal page with only the names that notebooks import."""
    page = ast.parse((ROOT / package / "minimal.py").read_text())
    names = [
        node.name for node in page.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name != "train"
    ]
    return PAGE.format(number=number) + "".join(OPEN.format(name=name, package=package) for name in names)


def write_bundle(names, bundle):
    """Gradescope's bundle: its two scripts, and an archive of these files."""
    with tempfile.NamedTemporaryFile() as packed, zipfile.ZipFile(bundle, "w") as file:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in names:
                archive.add(ROOT / name, f"{GRADER}/{name}")
        packed.flush()
        file.write(packed.name, f"{GRADER}.tar.gz")
        for script in ("setup.sh", "run_autograder"):
            file.write(ROOT / HERE / script, script)


if __name__ == "__main__":
    main()
