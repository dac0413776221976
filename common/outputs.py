"""Arguments, files and messages of commands. Files are tried first, so that no training is lost to a missing folder."""

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import InputError
from common.measure import tables
from common.measure.hardware import commit
from common.ranks.world import RankFailed, speaks_first

ROOT = Path(__file__).parent.parent
KINDS = {"int": {"type": int}, "float": {"type": float}, "flag": {"action": "store_true"}, "text": {}}
TRIAL = 4096  # bytes that a file system must have free


class Parser(argparse.ArgumentParser):
    """One that names the option that a misspelt one is near to."""

    def error(self, message):
        unknown = re.match("unrecognized arguments: (--[^ =]+)", message)
        super().error(message + (did_you_mean(unknown[1], self._option_string_actions) if unknown else ""))


def did_you_mean(name, known):
    """A question after an unknown name, "; did you mean h100-80g?"; "" if none of `known` is near."""
    return "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name.lower(), known, n=1))


def parser_of(module, description):
    """A parser for the arguments of `python -m module`; help keeps the description's line breaks."""
    parser = Parser(f"python -m {module}", description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -5GB is a value, too
    return parser


def add_options(parser, options, **known):
    """Add options as a TOML file has them, {name: what argparse is given}, to a parser or a group of one.

    A type is one of KINDS. `known` fills in what stands in braces in a help.
    """
    for name, given in options.items():
        about = {"type": "text", "help": "", **given}
        about["help"] = about["help"].format(**known)
        parser.add_argument(f"--{name}", **KINDS[about.pop("type")], **about)


@contextlib.contextmanager
def one_line_errors():
    """Turn an InputError, or an exercise's open part, into one line on stderr and status 2; Ctrl-C into status 130."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (InputError, RankFailed) as error:
        said = str(error)
        if isinstance(error, RankFailed):
            said = said.strip().splitlines()[-1].removeprefix("NotImplementedError: ")
            if not said.endswith("is still open"):
                raise
        if speaks_first():
            print(f"error: {said}", file=sys.stderr)
        sys.exit(2)


def check_counts(options, *names):
    """Raise InputError if an option is below 1; None means not given."""
    for name in names:
        if (number := getattr(options, name)) is not None and number < 1:
            raise InputError(f"--{name.replace('_', '-')} {number}: at least 1 is needed")


def check_clone(folder, otherwise=""):
    """Raise InputError if a folder of the repository is missing, as it is not installed with the packages."""
    if not (ROOT / folder).is_dir():
        needed = f"this needs {folder}/ of the repository, which is not installed"
        raise InputError(f"{needed}: run it in a clone{otherwise}")


def check_outputs(options):
    """Try all files that a command's options name, --json, --trace and --figure. Raises InputError if one fails."""
    for option in ("json", "trace", "figure"):
        check_output(f"--{option}", getattr(options, option, None))
    if hasattr(options, "figure"):
        check_output("--json", picture(options))


def picture(options):
    """A command's figure: --figure, else beside --json; None if neither is given, or --json is not a file."""
    if options.figure or not options.json or (os.path.exists(options.json) and not os.path.isfile(options.json)):
        return options.figure
    return str(Path(options.json).with_suffix(".png"))


def asked(parser, arguments, figure=False):
    """The parsed options of a measuring command: its own, --json and, with `figure`, --figure; all files tried."""
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    if figure:
        parser.add_argument("--figure", metavar="PNG", help="draw here (default: beside --json)")
    options = parser.parse_args(arguments)
    check_outputs(options)
    return options


def tell(options, results, table, figure=None):
    """Publish results, None on ranks other than 0, as one table and, with `figure(results)`, one matplotlib figure."""
    if results is not None:
        publish(options, results, [table(results)], figure and (lambda path: figure(results).savefig(path, dpi=120)))


def publish(options, results, shown, draw=None):
    """Write a command's results to its --json and, by `draw(path)`, its --figure; then show its tables."""
    with one_line_errors():
        if options.json:
            write_json(options.json, results)
        if draw is not None and picture(options):
            with written(picture(options)):
                draw(picture(options))
    for table in shown:
        tables.show(table)


def check_output(option, path):
    """Raise InputError if a file cannot be written; an existing file is unchanged."""
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
        if stat.S_ISREG(mode):  # a pipe or /dev/null needs no space
            try_folder(folder)
    except OSError as error:
        raise InputError(f"{option} {path}: it cannot be written ({error.strerror}); name another file") from error


def try_folder(folder):
    """Write a temporary file in a folder. Raises OSError if that fails."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        trial.write(bytes(TRIAL))
        trial.flush()
        os.fsync(trial.fileno())


def check_name(option, path):
    """Raise InputError for an empty name, as a shell makes from an unset variable."""
    if path is not None and not str(path):
        raise InputError(f'{option} "": the name is empty; is a shell variable not set?')


def write_json(path, results):
    """Write results, {name: value}, as JSON: first their commit, then the keys in their order."""
    write_text(path, json.dumps({"commit": commit(), **results}, indent=2) + "\n")


def write_text(path, text):
    """Write a file. Raises InputError if that fails."""
    with written(path):
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(1)):  # /dev/stdout
            print(text, end="", flush=True)
        else:
            Path(path).write_text(text)


@contextlib.contextmanager
def written(path):
    """Turn an OSError into an InputError: one line that says why a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def progress_bar(*columns, shown=True):
    """A progress bar, with `columns` after the usual ones, if it is `shown` and in a terminal; a context manager."""
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*usual, *columns, console=console, transient=True, disable=not (shown and console.is_terminal))
