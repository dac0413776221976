"""`python -m common.lessons`: train the engines on four ranks, record them, and write a page for each increment."""

import argparse
from pathlib import Path

from common.errors import InputError
from common.lessons import page, recording
from common.lessons.sources import Source
from common.train import one_line_errors

# (the engine before, the engine after). The steps of offload, offload.nvme and zeropp are not among them: what they
# hold on a host, on disk or in second shards, and what they send in two hops, `events` does not see yet.
INCREMENTS = [
    ("stage0_ddp", "stage1_os"),
    ("stage1_os", "stage2_grad"),
    ("stage2_grad", "stage3_param"),
]


def main(arguments=None):
    """Parse the arguments, record, write the pages and name them."""
    parser = argparse.ArgumentParser(prog="python -m common.lessons", description=__doc__)
    parser.add_argument("--out", default="results/local/lessons", help="a folder (default: %(default)s)")
    parser.add_argument("--only", metavar="ENGINE", help="the page that leads to this engine, stage1_os for instance")
    options = parser.parse_args(arguments)
    with one_line_errors():
        for path in write(Path(options.out), options.only):
            print(path)


def write(out, only=None):
    """Record the engines and write the pages into a folder.

    Returns:
        The files, the index first.

    Raises:
        InputError: no page leads to the engine `only`.
    """
    chosen = [pair for pair in INCREMENTS if only in (None, pair[1])]
    if not chosen:
        raise InputError(f"--only {only}: no page leads there; choose one of {', '.join(b for _, b in INCREMENTS)}")
    recorded = recording.record_all(dict.fromkeys(name for pair in chosen for name in pair))
    about = described(next(iter(recorded.values())))
    pages = {pair: (Source(pair[0]), Source(pair[1])) for pair in chosen}
    links = [(file_of(pair), f"{before.label} to {after.label.lower()}") for pair, (before, after) in pages.items()]
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "index.html"]
    written[0].write_text(page.index(links, about))
    for pair, sources in pages.items():
        written.append(out / file_of(pair))
        written[-1].write_text(page.lesson(sources, [recorded[name] for name in pair], links, about))
    return written


def file_of(pair):
    """The page of an increment: stage0_ddp-stage1_os.html."""
    return f"{pair[0]}-{pair[1]}.html"


def described(one):
    """How the pages were recorded, in one line."""
    return (
        f"Recorded by `python -m common.lessons`: {recording.MODEL}, {one['parameters']:,} parameters, fp32, AdamW, "
        f"{recording.BATCH} samples a step, {recording.RANKS} ranks, buckets of {recording.BUCKET_MB} MiB; "
        f"{one['hardware']}."
    )


if __name__ == "__main__":
    main()
