"""`python -m course.site`: the explorer and the lesson pages in one folder, with a page that leads to them.

The folder needs no server of ours: open its index.html, or put it on any static host as it is.
"""

from common.outputs import one_line_errors, parser_of
from course.explorer.page import TITLE, explorer
from course.lessons import page, recording
from course.lessons.__main__ import INCREMENTS, described, opened, write


def main(arguments=None):
    """Parse the arguments, record, write the pages and name them."""
    parser = parser_of("course.site", __doc__)
    parser.add_argument("--out", metavar="FOLDER", default="results/local/site", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        out = opened(options.out)
        lessons = opened(out / "lessons")
        recorded = recording.record_all(dict.fromkeys(name for pair in INCREMENTS for name in pair))
        about = described(recorded)
        (out / "explorer.html").write_text(explorer(recorded, about))
        (out / "index.html").write_text(index(about))
        for path in (out / "index.html", out / "explorer.html", *write(lessons, INCREMENTS, recorded)):
            print(path)


def index(about):
    """The page that leads to the others."""
    body = f"""<p>ZeRO shards what data parallelism keeps whole on every GPU: optimizer states,
gradients, parameters.</p>
<p class="about">{page.inline(about)}</p></header><main><ul class="pages">
<li><a href="explorer.html">{TITLE}</a><p>Sliders for a model and its GPUs: the memory of each stage, what it sends, how
long that takes; and a step on four ranks to go through.</p></li>
<li><a href="lessons/index.html">ZeRO, increment by increment</a><p>Two neighbouring engines side by side: why each
change is there, what it saves and what it sends, and a step of both.</p></li>
</ul></main>"""
    return page.document("ZeRO, stage by stage", body, [])


if __name__ == "__main__":
    main()
