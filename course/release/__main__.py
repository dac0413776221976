"""`python -m course.release`: write what students get, without solutions, and an autograder for Gradescope."""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
import zipfile
from pathlib import Path

from common.errors import InputError
from common.outputs import ROOT, one_line_errors, parser_of
from course.exercises import EXERCISES, apart
from course.grader.drills import DRILLS
from course.grader.graded import Worlds
from course.grader.promises import PROMISES, record
from course.parts import written

NAME, GRADER = "zero-student", "zero-grader"
HERE = Path(__file__).parent.relative_to(ROOT)
# Engines that hold methods of the exercises, what shows them, and what needs those.
LEFT_OUT = (
    *("offload/", "zeropp/", "lab/offload/", "lab/zeropp/", "tests/", "course/lessons/"),
    *("course/slides/", "course/explorer/", "course/site.", "course/pages/faults.", "course/pages/hosts."),
    *(f"notebooks/{room}{page}_" for room in ("", "quizzes/") for page in ("07", "08", "09", "10", "12", "13", "14")),
    *(".ci/", ".github/", "Makefile", "CONTRIBUTING.md", "CITATION.cff", "README.md"),
    *("notebooks/exercises/", f"{HERE}/"),
    *(f"{exercise.package}/{file}" for exercise in EXERCISES for file in ("engine.py", "minimal")),
)
PAGE = '"""To be written in a notebook: what notebooks/0{number}_*.ipynb builds, under these names."""\n'
OPEN = 'def {name}(*arguments):\n    raise NotImplementedError("{shown} is still open")\n'
LINK = re.compile(r"\[([^]]*)\]\(([\w./-]+)(?:#[^)]*)?\)")  # its words, and the file


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
    drop_dead_links(tree)
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
    shutil.copy(ROOT / HERE / "students.md", tree / "README.md")


def write_exercises(tree):
    """Write exercises that give away nothing of each other, links to them as engines, and minimal pages to fill.

    What says how the later ones are cut goes, as it has lines of the earlier ones.
    """
    cut = tree / "course" / "exercises.toml"
    cut.write_text("\n[[exercise]]\n".join(cut.read_text().split("\n[[exercise]]\n")[: 1 + len(EXERCISES)]))
    for number, exercise in enumerate(apart(EXERCISES), 1):
        file, package = tree / exercise.path.relative_to(ROOT), tree / exercise.package
        file.parent.mkdir(exist_ok=True)
        file.write_text(written(exercise))
        (package / "engine.py").symlink_to(os.path.relpath(file, package))
        (package / "minimal.py").write_text(page_to_write(exercise.package, number))
    for file in (DRILLS.path, DRILLS.path.with_name("measure.toml")):
        shutil.copy(file, tree / file.relative_to(ROOT))


def drop_dead_links(tree):
    """In pages and notebooks; and of these, drop the sources that their cells printed, which may be solutions."""
    for page in tree.rglob("*.md"):
        page.write_text(linked(page.read_text(), page.parent))
    for page in tree.glob("notebooks/*.ipynb"):
        notebook = json.loads(page.read_text())
        for cell in notebook["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                cell["source"] = linked(text, page.parent).splitlines(keepends=True)
            elif "inspect.getsource" in text:
                cell["outputs"] = []
        page.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def linked(text, folder):
    """A page's text, with the words alone of each link to a file that is not there, seen from its folder."""
    return LINK.sub(lambda link: link[0] if (folder / link[2]).exists() else link[1], text)


def page_to_write(package, number):
    """A minimal page with only the names that notebooks import, and those of their methods."""
    page, open_ones = ast.parse((ROOT / package / "minimal.py").read_text()), []
    for node in page.body:
        shown = f"{package}/minimal.py: {getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            stubs = "\n".join(textwrap.indent(OPEN.format(name=name, shown=shown), "    ") for name in methods)
            open_ones.append(f"class {node.name}:\n{stubs}")
        elif isinstance(node, ast.FunctionDef) and node.name != "train":
            open_ones.append(OPEN.format(name=node.name, shown=shown))
    return "\n\n".join([PAGE.format(number=number), *open_ones])


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
