"""The increments, and the files of their pages."""

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
        f"Recorded by `python -m course.site`: {recording.MODEL}, {one['parameters']:,} parameters, fp32, AdamW, "
        f"{recording.BATCH} samples a step, {recording.RANKS} ranks, buckets of {recording.BUCKET_MB} MiB; "
        f"{one['hardware']}."
    )
