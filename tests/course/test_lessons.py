"""The lesson pages: every change has its note, the events are the engines' own, and a browser shows all of it.

Chromium comes from the distribution; without it, or without playwright, the tests that open a page are skipped.
"""

import contextlib
import copy
import re
import subprocess
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
from browsing import CONTRAST, SCREENS, assert_fits, opening, shards_shown
from engine_sources import CHANGED_METHODS, methods
from training import STAGES as FOUR_STAGES
from training import make_engine, same_bits, train_step

from common.measure.tables import show_bytes
from course.lessons import chart, diff, notes, recording
from course.lessons.events import Recorder
from course.lessons.page import INCREMENTS, file_of, inline, write
from course.lessons.patch import STEPS, patch
from course.lessons.sentences import moments, sentence
from course.lessons.sources import Source, neighbours

NAMES = (*dict.fromkeys(name for pair in INCREMENTS for name in pair), "zeropp.hybrid")  # the explorer has the last
PAIRS = pytest.mark.parametrize("pair", INCREMENTS, ids=lambda pair: pair[1])
STAGES = pytest.mark.parametrize("name", NAMES)
RANKS = range(recording.RANKS)
WAITING, OVERLAPPED = INCREMENTS[-1], {"allocate_gradients", "reduce", "update", "gather"}


@pytest.fixture(scope="module")
def recorded():
    """{stage: its ranks' recordings}."""
    return recording.record_all(NAMES)


@pytest.fixture(scope="module")
def pages(recorded, tmp_path_factory):
    """The folder with all pages."""
    folder = tmp_path_factory.mktemp("lessons")
    write(folder, INCREMENTS, recorded)
    return folder


@pytest.mark.parametrize("pair", STEPS, ids=lambda pair: pair[1])
def test_a_patch_makes_an_engine_the_next_one_and_tells_the_reason_of_every_change(pair, tmp_path):
    before, after = map(Source, pair)
    engine, diff = tmp_path / before.path, tmp_path / "step.diff"
    engine.parent.mkdir()
    engine.write_text("\n".join(before.lines) + "\n")
    diff.write_text(patch(before, after))
    subprocess.run(["git", "apply", diff], cwd=tmp_path, check=True)
    assert engine.read_text() == "\n".join(after.lines) + "\n"
    hunks = re.findall(r"^@@ .*? @@ (.*)", diff.read_text(), re.MULTILINE)
    assert all(hunks)
    for name in CHANGED_METHODS[pair[1]]:
        why = after.reasons().get(name) or after.method(name).docstring
        assert any(f"{name}: {why.rstrip('.')}" in hunk for hunk in hunks)


# ---- the code and its notes ---------------------------------------------------------------------------------------


@PAIRS
def test_every_method_that_differs_has_a_note_whose_lines_all_say_something(recorded, pages, pair):
    before, after = neighbours(*pair)
    one, other = (methods(name).keys() for name in pair)
    names = OVERLAPPED if pair == WAITING else CHANGED_METHODS.get(pair[1], one & other) | (other - one)
    found = {one.name: one for one in diff.pairs(before, after) if one.status in ("changed", "extended", "new")}
    assert names <= found.keys()
    text = (pages / file_of(pair)).read_text()
    for name in names:
        if pair[1] in FOUR_STAGES:  # elsewhere a docstring may say why
            assert name in after.reasons(), f"{pair[1]}'s page gives no reason for {name}"
        note = notes.note(found[name], *(recorded[stage] for stage in pair), after.reasons())
        shown = re.search(rf'data-name="{name}">.*?</dl>', text, re.DOTALL)[0]
        assert note["Why"]
        for what, line in note.items():
            assert not re.match("nothing(?!; before: .)", line)
            assert f"<dt>{what}</dt><dd>{inline(line)}</dd>" in shown


def test_notes_tell_what_was_counted(recorded):
    first, second, third, offload, infinity, zeropp, _ = INCREMENTS
    for name, pair, what, said in (
        ("owned", first, "Memory", "2.91 MB less of optimizer states: 3.88 MB before, 969 kB now"),
        ("reduce", first, "Sends", "1.45 MB in 5 reduce-scatters; before: 2.91 MB in 5 all-reduces*"),
        ("update", first, "Sends", "1.45 MB in 5 all-gathers, through `gather`; before: nothing"),
        ("allocate_gradients", second, "Memory", "takes 1.94 MB"),
        ("reduce", second, "Memory", "gives back 1.94 MB; before: nothing"),
        ("free", third, "Memory", "gives back 3.28 MB"),
        ("reduce", offload, "Moves", "484 kB down the bus, in 5 parts; before: nothing"),
        ("moves", offload, "Moves", "predicted for a step: 484 kB down the bus and 484 kB up the bus"),
        ("copy_up", infinity, "Moves", "820 kB up the bus, in 8 parts"),
        ("reduce_scatter", infinity, "Moves", "*; 500 kB written to disk, in 5 parts; before*"),
        ("owned", zeropp, "Memory", "969 kB more of parameters: 485 kB before, 1.45 MB now"),
        ("reduce_scatter", zeropp, "Sends", "16.1 kB in 5 reduce-scatters; 124 kB in 5 all-to-alls in the node*"),
    ):
        before, after = (Source(stage) for stage in pair)
        (found,) = (one for one in diff.pairs(before, after) if one.name == name)
        note = notes.note(found, *(recorded[stage] for stage in pair), after.reasons())
        assert fnmatchcase(note[what], said)


@PAIRS
def test_every_line_of_both_files_is_shown_and_equal_ones_are_equal(pair):
    sources = [Source(name) for name in pair]
    found = diff.pairs(*sources)
    for side, source in zip(("before", "after"), sources, strict=True):
        shown = [number for one in found for hunk in one.hunks for number in getattr(hunk, side)]
        assert len(shown) == len(set(shown))
        hidden = set(range(1, len(source.lines) + 1)) - set(shown)
        assert all(re.fullmatch(r"|    # ---- .* -+", source.lines[number - 1]) for number in hidden)
    for hunk in (hunk for one in found for hunk in one.hunks if hunk.equal and one.status != "inherited"):
        texts = [[s.lines[n - 1] for n in lines] for s, lines in zip(sources, (hunk.before, hunk.after), strict=True)]
        assert texts[0] == texts[1]


@PAIRS
def test_the_schedule_is_open_and_the_edges_are_folded(recorded, pages, pair):
    shown, _, folded = (pages / file_of(pair)).read_text().partition('<details class="fold edges">')
    core, edges = (set(re.findall(r'data-name="([^"]+)"', half)) for half in (shown, folded))
    heart = {"offload": {"placed", "moves", "reduce"}, "offload.nvme": {"placed", "moves", "read_ahead"}}
    heart["zeropp"] = {"owned", "all_gather", "reduce_scatter"}
    assert (OVERLAPPED if pair == WAITING else heart.get(pair[1], {"owned", "reduce"})) <= core
    assert not core & edges
    for name in pair:
        assert not Source(name).schedule & edges
        assert not {event.method for event in recorded[name]["events"]} & edges
    if pair[1] == "stage3_param":
        assert {"gather", "free", "prefetch", "before_forward", "end_backward", "update"} < core
        assert {"__init__", "pin", "unpin", "before_recomputation", "begin_load", "unsharded"} < edges


# ---- the events ---------------------------------------------------------------------------------------------------


def events_of(recorded, name, *kinds):
    """A stage's events, all or of some kinds, with their numbers."""
    return [(n, event) for n, event in enumerate(recorded[name]["events"]) if not kinds or event.kind in kinds]


def cells(event, kind):
    """[rank][bucket]: letters for one of parameters, gradients, optimizer, second."""
    place = ("parameters", "gradients", "optimizer", "second").index(kind)
    return [{bucket: states[place] for bucket, states in of_rank.items()} for of_rank in event.cells]


def shards_in(states, rank, letters):
    """The shards that a rank has in one of some states; its own shard's letters follow the device's."""
    return {shard if shard < len(RANKS) else rank for shard, state in enumerate(states) if state in letters}


def numbers_of(recorded, name, kind, bucket):
    """The numbers of a bucket's events of one kind."""
    return [n for n, event in events_of(recorded, name, kind) if event.about == bucket]


@STAGES
def test_after_the_step_each_rank_holds_what_owned_says(recorded, name):
    one = recorded[name]
    for event in (one["events"][0], one["events"][-1]):
        for rank in RANKS:
            for bucket in one["buckets"]:
                for kind in ("parameters", "gradients", "optimizer"):
                    kept = getattr(one["owned"][rank][bucket["name"]], kind)
                    found = shards_in(cells(event, kind)[rank][bucket["name"]], rank, "rhnqt")
                    assert found == set(range(kept.start // bucket["shard_numel"], kept.stop // bucket["shard_numel"]))
    held = [event.bytes["held"] for event in one["events"]]
    receive_buffer = one["samples"]["device"][0][1]["receive buffer"]
    assert min(held) == held[0] == held[-1] == sum(one["measured"]["model_state_bytes"].values()) + receive_buffer


@STAGES
def test_every_bucket_is_reduced_once_and_stepped_from_its_mean_and_all_parameters_are_new(recorded, name):
    buckets = recorded[name]["owned"][0]
    assert len(buckets) > 3
    reductions = ("all_reduce", "reduce_scatter", "all_to_all in the node", "mean across nodes")
    assert sorted(event.about for _, event in events_of(recorded, name, *reductions)) == sorted(buckets)
    for _, event in events_of(recorded, name, "stepped"):
        for rank in RANKS:
            stepped = shards_in(cells(event, "optimizer")[rank][event.about], rank, "n")
            assert rank in stepped or (name == "zeropp.hybrid" and stepped)  # there a rank has two shards of its place
            assert stepped <= shards_in(cells(event, "gradients")[rank][event.about], rank, "h")
    last = recorded[name]["events"][-1]
    coming = {"t"} if name == "offload.nvme" else set()  # already read for the next forward
    for of_rank in cells(last, "parameters"):
        assert all(set(states) - coming <= {"n", "."} for states in of_rank.values())


@STAGES
def test_the_events_end_with_what_the_books_have(recorded, name):
    one = recorded[name]
    last, books = one["events"][-1], one["measured"]
    assert books == one["predicted"]
    assert last.bytes["sent"] == sum(books["wire_bytes_per_step"].values())
    assert last.bytes["left"] == sum(books["internode_bytes_per_step"].values())
    moved = books.get("bus_bytes_per_step", {}) | books.get("disk_bytes_per_step", {})
    assert {way: last.bytes[way] for way in notes.WAYS if way in last.bytes} == moved
    for before, after in pairwise(one["events"]):
        assert all(before.bytes[way] <= after.bytes[way] for way in ("sent", "left", *moved))
    for area in {"offload": ("host",), "offload.nvme": ("disk",)}.get(name, ()):
        assert last.bytes[area] == sum(books[f"{area}_state_bytes"].values())


@PAIRS
def test_the_table_of_a_page_shows_the_books_of_both_engines(recorded, pages, pair):
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', (pages / file_of(pair)).read_text())
    shown = {said: values for said, *values in rows}
    books = [recorded[name]["measured"] for name in pair]
    for name, names, where in (
        ("host_state_bytes", notes.STATES, "on the host"),
        ("disk_state_bytes", notes.STATES, "on disk"),
        ("bus_bytes_per_step", notes.WAYS, "in a step"),
        ("disk_bytes_per_step", notes.WAYS, "in a step"),
    ):
        for what, nbytes in books[1].get(name, {}).items():
            assert not nbytes or shown[f"{names[what]} {where}"] == ["-", show_bytes(nbytes)]
    sums = {f"model states{' on the device' if 'host_state_bytes' in books[1] else ''}": "model_state_bytes"}
    sums["sent in a step"] = "wire_bytes_per_step"
    if pair[1] == "zeropp":
        sums["left the node in a step"] = "internode_bytes_per_step"
    for said, name in sums.items():
        assert shown[said] == [show_bytes(sum(book[name].values())) for book in books]


def test_a_disk_reads_what_a_step_takes_while_another_bucket_is_stepped(recorded):
    name = "offload.nvme"
    reads = {event.about: n for n, event in events_of(recorded, name, "read") if "optimizer" in event.names}
    stepped = [(n, event.about) for n, event in events_of(recorded, name, "stepped")]
    for (now, one), (_, following) in pairwise(stepped):
        assert reads[following] < now < numbers_of(recorded, name, "write", one)[0]


def test_second_shards_have_what_was_gathered_until_the_step_outdates_them(recorded):
    events = recorded["zeropp"]["events"]
    rounded = {event.about for _, event in events_of(recorded, "zeropp", "all_to_all across nodes")}
    for rank in RANKS:
        own = {2 * (rank % 2), 2 * (rank % 2) + 1}
        for bucket in recorded["zeropp"]["owned"][rank]:
            assert shards_in(cells(events[0], "second")[rank][bucket], rank, "s") == own
            for number in numbers_of(recorded, "zeropp", "stepped", bucket):
                letter = "q" if bucket in rounded else "h"
                assert shards_in(cells(events[number - 1], "second")[rank][bucket], rank, letter) == own
                assert shards_in(cells(events[number], "second")[rank][bucket], rank, "s") == own


def test_stage_3_gathers_all_but_the_root_ahead_and_computes_with_whole_units_only(recorded):
    for _, event in events_of(recorded, "stage3_param", "all_gather"):
        assert ("prefetch" in event.within) == (event.about != "the root")
        for rank, of_rank in enumerate(cells(event, "parameters")):
            assert shards_in(of_rank[event.about], rank, "t") == {*RANKS} - {rank}
    for phase in ("forward", "backward"):
        computes = {part: event for _, event in events_of(recorded, "stage3_param", phase) for part in event.names}
        for block in (f"blocks.{number}" for number in range(4)):
            assert all(set(of_rank[block]) == {"h"} for of_rank in cells(computes[block], "parameters"))


@STAGES
def test_every_event_has_a_sentence_and_most_a_line_of_code(recorded, name):
    one, source, before = recorded[name], Source(name), None
    nbytes = {bucket["name"]: bucket["nbytes"] for bucket in one["buckets"]}
    for event in one["events"]:
        said = sentence(event, before, nbytes)
        assert said.endswith(".")
        assert "is done with" not in said  # the fallback sentence
        if event.kind in ("pack", "all_reduce", "reduce_scatter", "all_gather", "arrive", "stepped"):
            section = (source.base if event.inherited else source).method(event.method)
            assert event.lines[0] in section.numbers
        before = event


@PAIRS
def test_moments_are_those_at_which_the_same_part_computes_on_both_sides(recorded, pair):
    found = moments(*(recorded[name]["events"] for name in pair))
    for side, name in zip(("before", "after"), pair, strict=True):
        events, numbers = recorded[name]["events"], [moment[side] for moment in found]
        assert numbers == sorted(numbers)
        assert (numbers[0], numbers[-1]) == (0, len(events) - 1)
        for moment in found:
            phase, _, parts = moment["said"].partition(" of ")
            if parts:
                event = events[moment[side]]
                assert (event.kind, set(re.split(", | and ", parts)) - set(event.names)) == (phase, set())
    assert {"backward of blocks.1", "the step begins"} < {moment["said"] for moment in found}


def test_ranks_that_diverge_are_noticed(recorded):
    mine = {"events": recorded["stage1_os"]["events"], "buckets": []}
    other = copy.deepcopy(mine)
    other["events"][5].names = ["has_changed"]
    with pytest.raises(AssertionError, match="has_changed"):
        recording.together([mine, other])


@STAGES
def test_a_recorder_changes_nothing(world, name):
    recorded, plain = (make_engine(name) for _ in range(2))
    for engine, looks_on in ((recorded, True), (plain, False)):
        train_step(engine, world)
        before = set(vars(engine)), set(vars(engine.comm))
        with Recorder(engine) if looks_on else contextlib.nullcontext():
            train_step(engine, world, step=1)
        assert before == (set(vars(engine)), set(vars(engine.comm)))
    assert same_bits(recorded.full_state_dict(), plain.full_state_dict())


def test_a_timeline_shows_the_peak_on_an_axis_that_both_share(recorded, pages):
    for pair in INCREMENTS:
        text = (pages / file_of(pair)).read_text()
        ticks = [re.findall(r'class="tick" style="bottom:([\d.]+)%">(\d+)', half) for half in text.split("<figure")[1:]]
        assert ticks == [ticks[0]] * 2
    phases = [phase for phase in ("forward", "backward", "step") for _ in range(300)]
    samples = [(phase, dict.fromkeys(chart.CLASSES, 10)) for phase in phases]
    samples[777] = ("step", dict.fromkeys(chart.CLASSES, 20))
    drawn = chart.timeline("", {"device": samples}, top=20 * len(chart.CLASSES))
    assert min(map(float, re.findall(r"[ML]\d+ ([\d.]+)H", drawn))) == 0


# ---- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(browser, pages):
    """`opened(file, screen, scheme)`: a loaded page."""
    with opening(browser) as open_page:
        yield lambda file, *looks, **named: open_page((pages / file).as_uri(), *looks, **named)


@PAIRS
@pytest.mark.parametrize("screen", SCREENS)
def test_a_page_fits_its_screen_in_letters_that_can_be_read(opened, pair, screen):
    page = opened(file_of(pair), screen)
    assert_fits(page, screen)
    for text in ("h1", "#code .note dd", "#code .line code", "#memory .tick", ".stepper.shown .sentence"):
        assert page.locator(text).locator("visible=true").first.inner_text().strip()
    assert "Recorded by python -m course.site: gpt-nano" in page.locator(".about").inner_text()
    equal_on_the_left = page.locator(".pair .equal .before").first
    assert equal_on_the_left.is_visible() == (screen != "phone")  # on a phone equal lines are shown once
    assert page.locator(".stepper").locator("visible=true").count() == (1 if screen == "phone" else 2)


def test_light_and_dark_by_the_system_and_by_the_button(opened):
    file = file_of(INCREMENTS[0])
    light, dark = (opened(file, scheme=scheme) for scheme in ("light", "dark"))
    (white, one), (black, other) = light.evaluate(CONTRAST), dark.evaluate(CONTRAST)
    assert white != black
    assert min(one, other) > 7
    for color in (black, white):
        light.locator("#theme").click()
        assert light.evaluate(CONTRAST)[0] == color


@PAIRS
def test_the_stepper_steps_by_click_and_by_slider(opened, recorded, pair):
    page = opened(file_of(pair))
    for side, name in zip(("before", "after"), pair, strict=True):
        stepper, last = page.locator(f".stepper[data-side={side}]"), len(recorded[name]["events"])
        seen = []
        for go in ("next", "next", "back", "last", "next", "first", "back"):
            stepper.locator(f"[data-go={go}]").click()
            seen.append(int(re.search(r"Event (\d+) of", stepper.locator(".count").inner_text())[1]))
        assert seen == [2, 3, 2, last, last, 1, 1]
        stepper.locator("input").fill("7")
        assert stepper.locator(".count").inner_text().startswith("Event 8 of")
        order = [0, 3, 1, 2] if name == "zeropp" else [0, 1, 2]  # secondary shards after parameters
        shown, cells_of = shards_shown(stepper), recorded[name]["events"][7].cells
        assert shown == [cells_of[rank][bucket][kind] for bucket in cells_of[0] for rank in RANKS for kind in order]
        stepper.locator("[data-go=last]").click()
        counted = recorded[name]["events"][-1].bytes
        for what in counted.keys() & {"sent", *notes.WAYS}:
            assert stepper.locator(f"b.{what}").inner_text() == show_bytes(counted[what])


def test_the_stepper_steps_by_keys_and_plays(opened):
    page = opened(file_of(INCREMENTS[2]))
    count, other = (page.locator(f".stepper[data-side={side}] .count") for side in ("after", "before"))
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)):
        page.keyboard.press(key)
        assert count.inner_text().startswith(f"Event {number} of")
    page.locator("[data-side=before] input").focus()
    for key in (*["Tab"] * 4, "Enter"):  # past First, Back and Play to Next
        page.keyboard.press(key)
    assert count.inner_text().startswith("Event 3 of")
    page.keyboard.press("End")
    assert re.match(r"Event (\d+) of \1,", count.inner_text())
    page.keyboard.press("Home")
    assert [of.inner_text()[:11] for of in (count, other)] == ["Event 1 of "] * 2
    page.locator("[data-side=after] input").focus()
    page.keyboard.press("ArrowRight")
    assert count.inner_text().startswith("Event 2 of")
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelector('[data-side=after] .count').innerText.startsWith('Event 3 of')")
    page.keyboard.press(" ")
    assert page.locator("[data-side=after] [data-go=play]").inner_text() == "Play"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"  # the focus is visible


def test_two_keys_step_both_engines_from_one_shared_moment_to_the_next(opened):
    page = opened(file_of(INCREMENTS[2]))
    both, sentences = page.locator(".moment"), page.locator(".stepper .sentence")
    for keys, moment in (
        ("nnn", "Both at: forward of blocks.1"),  # past wte and wpe, and blocks.0
        (["ArrowRight"], "Each at a moment of its own"),
        ("p", "Both at: forward of blocks.1"),
    ):
        for key in keys:
            page.keyboard.press(key)
        assert both.inner_text() == moment
    assert all("blocks.1" in said for said in sentences.all_inner_texts())
    page.locator("[data-both='-1']").press("Enter")
    assert both.inner_text() == "Both at: forward of blocks.0"
    for _ in range(30):
        page.keyboard.press("n")
    assert both.inner_text() == "Both at: the step is over"


def test_a_print_shows_all_folds_both_engines_and_no_controls(opened):
    page = opened(file_of(INCREMENTS[2]), scheme="dark")
    assert not page.locator("[data-name=unsharded]").is_visible()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("[data-name=unsharded]").is_visible()
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("button, input").locator("visible=true").count() == 0
    assert page.locator(".stepper").locator("visible=true").count() == 2
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


@PAIRS
def test_every_picture_says_what_it_shows(opened, recorded, pair):
    page = opened(file_of(pair))
    assert all(page.locator("svg, img, [role=img], progress").evaluate_all("all => all.map((one) => one.ariaLabel)"))
    says = "all => all.map((one) => one.getAttribute('role') + one.ariaLabel)"
    charts = page.locator(".plot:not(.narrow) svg").evaluate_all(says)
    for chart_says, name in zip(charts, pair, strict=True):
        highest = sum(chart.peak(recorded[name]["samples"]["device"]).values())
        assert re.match(r"img[\w+ -]+: live bytes .* peak in (for|back)ward with ", chart_says)
        assert show_bytes(highest) in chart_says
    beside, areas = page.locator(".narrow svg").evaluate_all(says), recorded[pair[1]]["areas"][1:]
    for area_says, area in zip(beside, areas, strict=True):
        books = recorded[pair[1]]["measured"][f"{area}_state_bytes"]
        assert all(show_bytes(nbytes) in area_says for nbytes in books.values() if nbytes)


def test_an_event_leads_to_its_line_in_the_code_above(opened, recorded):
    page = opened(file_of(INCREMENTS[0]))
    number, event = events_of(recorded, "stage1_os", "pack")[0]
    page.locator("[data-side=after] input").fill(str(number))
    line = page.locator(f"#after-{event.lines[0]}")
    assert "now" in line.get_attribute("class").split()
    assert not line.is_visible()  # within unchanged lines, which are folded
    page.locator("[data-side=after] .cause a").click()
    assert line.is_visible()
    assert "bucket.pack(name, gradient)" in line.inner_text()


def test_a_phone_shows_one_engine_and_switches(opened):
    page = opened(file_of(INCREMENTS[1]), "phone")
    before, after = (page.locator(f"[data-side={side}].stepper") for side in ("before", "after"))
    assert (before.is_visible(), after.is_visible()) == (False, True)
    page.locator("[data-show=before]").click()
    assert (before.is_visible(), after.is_visible()) == (True, False)
    page.locator("[data-side=before] [data-go=last]").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_first_page_leads_to_all_others(opened):
    page = opened("index.html")
    titles = page.locator(".pages a").all_inner_texts()
    assert titles[2:4] == ["Stage 2 to stage 3", "Stage 2 to ZeRO-Offload"]
    for number in range(len(INCREMENTS)):
        page.locator(".pages a").nth(number).click()
        assert page.locator("h1").inner_text() == titles[number]
        page.locator("nav a").first.click()
    assert page.locator("h1").inner_text() == "ZeRO, increment by increment"
