"use strict";
// Arrow keys, space, page keys, Home and End, and a swipe, move; n, or a tap on the slide's number, shows the notes. Each slide has its fragment: #7.
const slides = [...document.querySelectorAll(".slide")];
let at = 0;

function show(number, write = true) {
  at = Math.min(Math.max(number, 0), slides.length - 1);
  slides.forEach((slide, n) => slide.classList.toggle("now", n === at));
  if (write) history.replaceState(null, "", `#${at + 1}`);
  fit();
}

// A slide is 1280 x 720 and is scaled to the window; the notes take the place below it.
function fit() {
  const notes = document.body.classList.contains("notes") ? slides[at].querySelector("aside").offsetHeight : 0;
  const scale = Math.min(innerWidth / 1280, (innerHeight - notes) / 720);
  document.documentElement.style.setProperty("--scale", scale);
  document.documentElement.style.setProperty("--left", `${(innerWidth - 1280 * scale) / 2}px`);
  document.documentElement.style.setProperty("--top", `${(innerHeight - notes - 720 * scale) / 2}px`);
}

function toggleNotes() {
  document.body.classList.toggle("notes");
  fit();
}

// A button that keeps the focus would take the space key for itself.
for (const button of document.querySelectorAll(".foot button"))
  button.addEventListener("click", () => { toggleNotes(); button.blur(); });

const moves = {
  ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1, Home: -Infinity, End: Infinity,
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "n") toggleNotes();
  if (event.key in moves) { event.preventDefault(); show(at + (event.key === " " && event.shiftKey ? -1 : moves[event.key])); }
});
let began = null;
addEventListener("touchstart", (event) => { began = event.touches.length === 1 ? event.touches[0].clientX : null; }, { passive: true });
addEventListener("touchend", (event) => {
  const moved = began === null ? 0 : event.changedTouches[0].clientX - began;
  if (Math.abs(moved) > 40) show(at + (moved < 0 ? 1 : -1));
});
addEventListener("resize", fit);
addEventListener("hashchange", () => show(Number(location.hash.slice(1)) - 1 || 0, false));
document.body.classList.add("live");
show(Number(location.hash.slice(1)) - 1 || 0);
