"""Run notebooks from a clean kernel, and store in them what they print and draw.

    python -m course.execute                        all of notebooks/
    python -m course.execute notebooks/02_gradients.ipynb

Stored outputs belong to these cells: a digest of their text is stored too, and a test compares it.
"""

import hashlib
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.reader import NotJSONError

from common.errors import InputError
from common.outputs import ROOT, check_clone, one_line_errors, parser_of

FOLDER = ROOT / "notebooks"
SECONDS = 300  # that a cell may take
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(argv=None):
    parser = parser_of("course.execute", __doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    with one_line_errors():
        check_clone("notebooks/exercises")
        notebooks = {path: read(path) for path in parser.parse_args(argv).notebooks}
    for path, notebook in notebooks.items():
        try:
            execute(notebook, path.parent)
        except CellExecutionError as error:
            sys.exit(f"{path.name}: a cell raised, and nothing was stored\n{error}")
        path.write_text(without_places(nbformat.writes(notebook)))
        print(path.name)


def read(path):
    """The notebook in a file.

    Raises:
        InputError: the file is missing, or is no notebook.
    """
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, NotJSONError) as error:
        raise InputError(f"{path}: there is no notebook; give the path of one, or nothing to run all") from error


def execute(notebook, folder):
    """Run all cells with the kernel in `folder`; outputs and a digest of the sources are there afterwards.

    Raises:
        CellExecutionError: a cell raised.
    """
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False).execute()
    notebook.metadata = nbformat.from_dict({**METADATA, "executed": digest(notebook)})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def without_places(text):
    """Tracebacks name files: those of this repository from its root on, and cells as such."""
    return re.sub(r"/[\w/]*ipykernel_\d+/\d+\.py", "cell", text.replace(f"{FOLDER.parent}/", ""))


def digest(notebook):
    """A digest of the sources of all cells."""
    return hashlib.sha256("\n\n".join(cell.source for cell in notebook.cells).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
