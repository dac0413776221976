"""Chromium, for tests of pages: the screen sizes, and how a page is opened."""

import contextlib
import os
import shutil

import pytest

SCREENS = {"phone": (375, 800), "laptop": (1280, 800), "projector": (1920, 1080)}
CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [red, green, blue] = numbers(color).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const style = getComputedStyle(document.body);
  const [low, high] = [style.color, style.backgroundColor].map(luminance).sort((one, other) => one - other);
  return [style.backgroundColor, (high + 0.05) / (low + 0.05)];
}"""
LETTERS = {"phone": 10, "laptop": 10, "projector": 13}  # the smallest that can be read there
SMALLEST = """() => Math.min(...[...document.querySelectorAll("body *")]
  .filter((one) => one.checkVisibility() && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((one) => parseFloat(getComputedStyle(one).fontSize)))"""


@contextlib.contextmanager
def chromium():
    """The distribution's Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("there is no chromium")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@contextlib.contextmanager
def opening(browser):
    """Yield `open_page(address, screen, scheme)`, which returns a loaded page.

    On exit, asserts that no script failed, and that no page fetched anything.
    """
    contexts, wrong = [], []

    def asks(request):
        if not request.is_navigation_request() and not request.url.startswith("data:"):
            wrong.append(request.url)

    def open_page(address, screen="laptop", scheme="light"):
        width, height = SCREENS[screen]
        size = {"width": width, "height": height}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce"))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", asks)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def assert_fits(page, screen):
    """Nothing is wider than the screen, and all letters can be read."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(SMALLEST) >= LETTERS[screen]


def shards_shown(stepper):
    """The states of all shards that a stepper shows, a row of letters for each."""
    return stepper.locator(".ranks .shards").evaluate_all(
        "rows => rows.map((row) => [...row.children].map((cell) => cell.dataset.state).join(''))"
    )
