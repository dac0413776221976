"""The explorer states the planner's figures, shows recorded steps, and works by key, on every screen, in both themes.

Chromium comes from the distribution; without it, or without playwright, these tests are skipped.
"""

import functools
import random
import re
import shlex

import pytest
from browsing import CONTRAST, assert_fits, opening, shards_shown

from course import site
from course.explorer.page import explorer
from course.lessons import recording
from course.lessons.page import INCREMENTS
from lab.plan import __main__ as plan
from lab.plan import shapes

DRAWN = 200
KEYS = ("way", "engine", "own", "states", "host", "disk", "moment", "transient", "activations", "device", "sent")
KEYS += ("sent_by_node", "bus", "disk_moved", "seconds", "step_seconds", "refused", "fits")
CHECKS = ("sequence_parallel", "fused_loss", "offload_activations")
STATED = """settings => settings.map((one) => {
  setting = { ...USUAL, ...one };
  const { rows, compute_seconds, advised, refused } = figures(setting);
  return { rows, compute_seconds, advised, refused, command: command() };
})"""


@pytest.fixture(scope="module", autouse=True)
def each_model_is_looked_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "of_model", functools.cache(shapes.of_model))
        yield


@pytest.fixture(scope="module")
def recorded():
    """{stage: its ranks' recordings}."""
    return recording.record_all(INCREMENTS[0])


@pytest.fixture(scope="module")
def file(recorded, tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer(recorded, "recorded for a test"))
    return path


@pytest.fixture
def opened(browser, file):
    """`opened(setting, screen, scheme)`: a loaded page."""
    with opening(browser) as open_page:
        yield lambda setting="", *looks, **named: open_page(f"{file.as_uri()}#{setting}", *looks, **named)


def draw(numbers):
    """Any setting that the controls allow, and numbers between their stops."""
    return {
        "model": numbers.choice(["", "", *(run["model"] for run in plan.LANDMARKS.values()), *shapes.PRESETS]),
        "params": float(f"{10 ** numbers.uniform(6, 13.5):.{numbers.randint(0, 4)}e}"),
        "gpu": numbers.choice(sorted(plan.PRESETS)),
        "world_size": numbers.choice((1, 2, 8, 16, 48, 64, 96, 384, 1024, 2240, 4096)),
        "per_node": numbers.choice((1, 2, 3, 4, 8, 16)),
        "tensor": numbers.choice((1, 1, 1, 2, 4, 8)),
        "pipeline": numbers.choice((1, 1, 1, 2, 12, 35)),
        "batch": numbers.choice((1, 2, 7, 64)),
        "accumulate": numbers.choice((1, 1, 2, 16)),
        "seq": numbers.choice((128, 1024, 2048, 131072)),
        "precision": numbers.choice(("fp32", "bf16", "fp16")),
        "checkpoints": numbers.random() < 0.6,
        **{check: numbers.random() < 0.3 for check in CHECKS},
        **{switch: numbers.random() < 0.6 for switch in plan.SWITCHES},
    }


def test_it_states_the_figures_of_the_command_that_it_names(opened):
    numbers = random.Random(35)
    settings = [draw(numbers) for _ in range(DRAWN)]
    refused = 0
    for setting, stated in zip(settings, opened().evaluate(STATED, settings), strict=True):
        command = shlex.split(stated["command"])
        assert command[:3] == ["python", "-m", "lab.plan"]
        options = plan.parser().parse_args(command[3:])
        if stated.get("refused"):
            refused += 1
            with pytest.raises(plan.InputError, match=r"does not divide|at most"):
                plan.plan(options)
            continue
        planned = plan.plan(options)
        assert stated["compute_seconds"] == pytest.approx(planned["compute_seconds"], rel=1e-12)
        for mine, theirs in zip(stated["rows"], planned["rows"], strict=True):
            assert mine.keys() == set(KEYS) < theirs.keys()
            for key in KEYS:
                said = f"{key} of {theirs['way']}, {setting}"
                whole = key == "own" and mine["engine"] == "zeropp"  # the command names only the switches that are off
                expected = {**dict.fromkeys(plan.SWITCHES, True), **theirs[key]} if whole else theirs[key]
                assert mine[key] == near(expected), said
        advice = stated.get("advised")
        assert planned["advice"].startswith("Nothing fits" if advice is None else stated["rows"][advice]["way"])
    assert refused < DRAWN / 2


def near(expected):
    """Equal up to the rounding of a few operations; text and booleans exactly."""
    if isinstance(expected, dict):
        return {key: near(value) for key, value in expected.items()}
    return pytest.approx(expected, rel=1e-12) if type(expected) in (int, float) else expected


@pytest.mark.parametrize("landmark", plan.LANDMARKS)
def test_a_run_that_papers_tell_of_is_the_planners(opened, landmark):
    page = opened()
    model, gpu, ranks = (plan.LANDMARKS[landmark][name] for name in ("model", "gpu", "world_size"))
    gpu = re.search(r"[A-Z]\d{3}", plan.PRESETS[gpu].name)[0]
    page.locator("#landmark").select_option(f"{model} on {ranks} × {gpu}")
    command = shlex.split(page.locator("#command").inner_text())
    mine, theirs = (plan.plan(plan.parser().parse_args(given)) for given in (command[3:], ["--landmark", landmark]))
    assert mine["rows"] == theirs["rows"]
    chosen = mine["rows"][int(page.locator("[name=way]:checked").get_attribute("value"))]
    assert (chosen["engine"], chosen["fits"]) == (theirs["ran"], True)
    assert page.locator(".way:has(:checked) .fits").inner_text() == "fits"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        *((f"way={way}", rf"\b{gb} GB of model states") for way, gb in enumerate(("120", "31.4", "16.6", "1.88"))),
        ("world_size=8&pipeline=12", "^Tensor × pipeline, 12, does not divide 8 GPUs: choose other degrees.$"),
        ("gpu=abacus&world_size=-3&way=99&model=x&params=no", "GB of model states"),
    ],
    ids=[*(f"figure 1 of the ZeRO paper, stage {stage}" for stage in range(4)), "no such degrees", "no sense"],
)
def test_an_address_is_put_into_words_and_what_makes_no_sense_is_the_usual_setting(opened, setting, said):
    assert re.search(said, opened(setting).locator("#said").inner_text())


def test_sliders_go_by_key_and_the_address_has_the_setting(opened):
    page = opened("way=1")
    page.locator("#world_size").focus()
    before = page.locator(".total").all_inner_texts()
    page.keyboard.press("ArrowRight")
    assert page.locator("#world_size").get_attribute("aria-valuetext") == "96"
    assert page.locator("output[for=world_size]").inner_text() == "96"
    assert page.locator(".total").all_inner_texts() != before
    page.locator("[name=way]:checked").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#said").inner_text().startswith("Stage 2: ")
    page.locator("#hierarchical").press("Space")
    again = opened(page.url.partition("#")[2])
    for place in ("#said", "#command", "#ways", "#moved"):
        assert again.locator(place).inner_text() == page.locator(place).inner_text()
    assert "--with hierarchical=False" in again.locator("#command").inner_text()


def test_a_recorded_step_is_gone_through_by_mouse_and_key(opened, recorded):
    page = opened("way=1")
    stepper = page.locator(".stepper").locator("visible=true")
    assert stepper.get_attribute("data-side") == "stage1_os"
    stepper.locator("[data-go=next]").click()
    page.keyboard.press("ArrowRight")
    assert stepper.locator(".count").inner_text().startswith("Event 3 of")
    page.keyboard.press("End")
    last = recorded["stage1_os"]["events"][-1]
    shown = shards_shown(stepper)
    assert shown == [states for bucket in last.cells[0] for of_rank in last.cells for states in of_rank[bucket]]
    page.locator("#engines button").first.click()
    assert page.locator(".stepper").locator("visible=true").get_attribute("data-side") == "stage0_ddp"
    page.locator("[name=way]").last.check()
    assert page.locator("#unrecorded").inner_text().startswith("No step of hybrid sharding is recorded here")


@pytest.mark.parametrize(("screen", "scheme"), [("phone", "dark"), ("laptop", "light"), ("projector", "dark")])
def test_it_fits_its_screen_in_letters_that_can_be_read(opened, screen, scheme):
    page = opened("params=1e13&gpu=h200-141g&world_size=2240&way=7", screen, scheme)
    assert_fits(page, screen)
    assert page.evaluate(CONTRAST)[1] > 7
    if screen != "phone":  # the results are visible next to the sliders
        assert page.locator("#ways").evaluate("ways => ways.getBoundingClientRect().bottom < innerHeight")


def test_the_sliders_stay_in_sight_beside_the_results_and_cover_no_step(opened):
    page, box = opened(), "one => one.getBoundingClientRect()"
    page.locator("#held").evaluate("one => one.scrollIntoView()")
    assert page.locator("#setting").evaluate(box)["top"] == pytest.approx(0, abs=1)
    page.locator("#engines").evaluate("one => one.scrollIntoView()")
    assert page.locator("#setting").evaluate(box)["bottom"] <= page.locator("#step").evaluate(box)["top"]


def test_every_control_and_every_picture_has_a_name(opened):
    page = opened()
    name = "one.labels?.[0]?.innerText || one.innerText || one.ariaLabel"
    assert all(page.locator("input, select, button").evaluate_all(f"all => all.map((one) => {name})"))
    assert all(page.locator("[role=img]").evaluate_all("all => all.map((one) => one.ariaLabel)"))


def test_the_site_leads_to_every_page_of_it(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(site, "INCREMENTS", INCREMENTS[:1])
    monkeypatch.setattr(recording, "record_all", lambda names: recorded)
    site.main(["--out", str(tmp_path)])
    reached, new = set(), {tmp_path / "index.html"}
    while new:
        page = new.pop()
        reached.add(page)
        links = re.findall(r'href="([^"#:]+)"', page.read_text())
        new |= {(page.parent / link).resolve() for link in links} - reached
    assert {path.resolve() for path in reached} == {path.resolve() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(reached) == 4
