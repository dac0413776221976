"""What commands take, write and say. Files are tried at the start, so that no training is lost for want of a folder."""

import argparse
import contextlib
import errno
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import InputError
from common.measure import tables
from common.measure.hardware import commit
from common.ranks.world import speaks_first

ROOT = Path(__file__).parent.parent
TRIAL = 4096  # bytes that a file system must have left


def parser_of(module, description):
    """What parses the arguments of `python -m module`; help shows the description in its own lines."""
    how = argparse.RawTextHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=how)


@contextlib.contextmanager
def one_line_errors():
    """An InputError ends the program: one line, by one rank, and exit status 2."""
    try:
        yield
    except InputError as error:
        if speaks_first():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def check_counts(options, *names):
    """Refuse options below 1, by an InputError; None is one that was not given."""
    for name in names:
        if (number := getattr(options, name)) is not None and number < 1:
            raise InputError(f"--{name.replace('_', '-')} {number}: at least 1 is needed")


def check_clone(folder, otherwise=""):
    """Refuse, by an InputError, to run without a folder of the repository that is not installed with the packages."""
    if not (ROOT / folder).is_dir():
        needed = f"this needs {folder}/ of the repository, which is not installed"
        raise InputError(f"{needed}: run it in a clone{otherwise}")


def check_outputs(options):
    """Try all files that the options of a command name, --json, --trace and --figure; InputError for one that fails."""
    for option in ("json", "trace", "figure"):
        check_output(f"--{option}", getattr(options, option, None))
    if hasattr(options, "figure"):
        check_output("--json", picture(options))


def picture(options):
    """Where a command draws: at --figure, else beside --json; None where neither is given, or that is no file."""
    if options.figure or not options.json or (os.path.exists(options.json) and not os.path.isfile(options.json)):
        return options.figure
    return str(Path(options.json).with_suffix(".png"))


def asked(parser, arguments, figure=False):
    """The options of a command that finds something out: its own, --json, and with `figure` --figure; all tried."""
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    if figure:
        parser.add_argument("--figure", metavar="PNG", help="draw here (default: beside --json)")
    options = parser.parse_args(arguments)
    check_outputs(options)
    return options


def tell(options, results, table, figure=None):
    """Publish what has one `table(results)` and, with `figure(results)`, one picture, of matplotlib.

    The results are None on ranks but 0 under torchrun.
    """
    if results is not None:
        publish(options, results, [table(results)], figure and (lambda path: figure(results).savefig(path, dpi=120)))


def publish(options, results, shown, draw=None):
    """Write what a command found where its --json and --figure say, `draw(path)` the latter; then show its tables."""
    with one_line_errors():
        if options.json:
            write_json(options.json, results)
        if draw is not None and picture(options):
            with written(picture(options)):
                draw(picture(options))
    for table in shown:
        tables.show(table)


def check_output(option, path):
    """Refuse a file that could not be written, by an InputError that says why; one that is there stays as it is."""
    if path is None:
        return
    check_name(option, path)
    folder = Path(path).resolve().parent
    try:
        if not folder.is_dir():
            raise InputError(f"{option} {path}: there is no such folder; make it first")
        mode = stat.S_IFREG
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise InputError(f"{option} {path}: that is a folder; name a file in it")
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if stat.S_ISREG(mode):  # a pipe or /dev/null needs no room
            try_folder(folder)
    except OSError as error:
        raise InputError(f"{option} {path}: it cannot be written ({error.strerror}); name another file") from error


def try_folder(folder):
    """Write a file there that has no name, and is gone at once; OSError where nothing can be written."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        trial.write(bytes(TRIAL))
        trial.flush()
        os.fsync(trial.fileno())


def check_name(option, path):
    """Refuse an empty name, such as a shell makes of a variable that is not set."""
    if path is not None and not str(path):
        raise InputError(f'{option} "": the name is empty; is a variable of the shell not set?')


def write_json(path, results):
    """Write results for machines, {name: value}: the commit that they are of, then keys in their order."""
    write_text(path, json.dumps({"commit": commit(), **results}, indent=2) + "\n")


def write_text(path, text):
    """Write a file; InputError where it cannot be written any more."""
    with written(path):
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(1)):  # /dev/stdout, of which there is one
            print(text, end="", flush=True)
        else:
            Path(path).write_text(text)


@contextlib.contextmanager
def written(path):
    """In one line what keeps a file from being written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def progress_bar(*columns):
    """A progress bar, with columns of one's own behind the usual ones; a context manager."""
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*usual, *columns, console=console, transient=True, disable=not console.is_terminal)
