"""`python -m course.lessons`: train the engines on four ranks, record them, and write a page for each increment."""

from pathlib import Path

from common.errors import InputError
from common.outputs import one_line_errors, parser_of, try_folder
from course.lessons import page, recording
from course.lessons.sources import Source
from course.lessons.templates import render

# (the engine before, the engine after)
INCREMENTS = [
    ("stage0_ddp", "stage1_os"),
    ("stage1_os", "stage2_grad"),
    ("stage2_grad", "stage3_param"),
    ("stage2_grad", "offload"),
    ("stage3_param", "offload.nvme"),
    ("stage3_param", "zeropp"),
]


def main(arguments=None):
    """Parse the arguments, record, write the pages and name them."""
    parser = parser_of("course.lessons", __doc__)
    parser.add_argument("--out", default="results/local/lessons", help="a folder (default: %(default)s)")
    leads = "the page that leads to this engine: %(choices)s"
    parser.add_argument("--only", metavar="ENGINE", choices=[after for _, after in INCREMENTS], help=leads)
    options = parser.parse_args(arguments)
    with one_line_errors():
        out, increments = opened(options.out), [pair for pair in INCREMENTS if options.only in (None, pair[1])]
        recorded = recording.record_all(dict.fromkeys(name for pair in increments for name in pair))
        for path in write(out, increments, recorded):
            print(path)


def opened(out):
    """The path of the folder for pages, which is made if it is missing.

    Raises:
        InputError: the folder cannot be made, or no file in it.
    """
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        try_folder(out)
    except OSError as error:
        raise InputError(f"--out {out}: no page can be written there: {error.strerror}; give a folder") from error
    return Path(out)


def write(out, increments, recorded):
    """Write the pages of some increments into a folder, from what `recording.record_all` has; return their paths."""
    about, sources = described(recorded), {pair: [Source(name) for name in pair] for pair in increments}
    links = [(file_of(pair), f"{before.label} to {after.named}") for pair, (before, after) in sources.items()]
    leads = [after.paragraphs[0] for _, after in sources.values()]
    pages = {"index.html": render("index.html", lessons=zip(links, leads, strict=True), about=about)}
    for pair in increments:
        pages[file_of(pair)] = page.lesson(sources[pair], [recorded[name] for name in pair], links, about)
    for name, text in pages.items():
        (out / name).write_text(text)
    return [out / name for name in pages]


def file_of(pair):
    """The page of an increment: stage0_ddp-stage1_os.html."""
    return f"{pair[0]}-{pair[1]}.html"


def described(recorded):
    """How the engines were recorded, in one line."""
    one = next(iter(recorded.values()))
    return (
        f"Recorded by `python -m course.lessons`: {recording.MODEL}, {one['parameters']:,} parameters, fp32, AdamW, "
        f"{recording.BATCH} samples a step, {recording.RANKS} ranks, buckets of {recording.BUCKET_MB} MiB; "
        f"{one['hardware']}."
    )


if __name__ == "__main__":
    main()
