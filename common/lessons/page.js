"use strict";

// ---- the theme ----

document.getElementById("theme").addEventListener("click", () => {
  const style = document.documentElement.style;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  style.colorScheme = (style.colorScheme || system) === "dark" ? "light" : "dark";
});

// ---- folds ----

// Paper has no folds: they open for the print, and close after it.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const box of opened) box.open = true;
});
addEventListener("afterprint", () => {
  for (const box of opened) box.open = false;
});

// ---- a step ----

const KINDS = ["parameters", "gradients", "optimizer"];
const SAID = {
  ".": "not held", r: "room, still empty", o: "its own gradients", t: "on its way", h: "held", n: "held, stepped",
};
const PAUSE = 1500; // milliseconds between events that play by themselves

function start(steps) {
  const steppers = [...document.querySelectorAll(".stepper")].map((place) => new Stepper(place, steps));
  let active = steppers[1]; // whom keys go to: the one last used

  const show = (stepper) => {
    active = stepper;
    for (const one of steppers) one.place.classList.toggle("shown", one === stepper);
    for (const button of document.querySelectorAll("[data-show]")) {
      button.setAttribute("aria-pressed", button.dataset.show === stepper.side);
    }
  };
  show(active);

  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => show(steppers.find((one) => one.side === button.dataset.show)));
  }
  for (const stepper of steppers) {
    stepper.place.addEventListener("focusin", () => show(stepper));
    stepper.place.addEventListener("pointerdown", () => show(stepper));
  }

  // Moments that both engines share: the same part computes on both sides, for instance.
  const { moments } = steps;
  const shared = () => moments.findIndex((moment) => steppers.every((one) => one.at === moment[one.side]));
  const goBoth = (way) => {
    const passed = moments.findLastIndex((moment) => moment[active.side] <= active.at);
    const to = shared() >= 0 ? shared() + way : passed + Math.max(0, way); // each on its own: back to the last one passed
    const moment = moments[Math.min(moments.length - 1, Math.max(0, to))];
    for (const one of steppers) {
      one.stop();
      one.show(moment[one.side]);
    }
  };
  const tell = () => {
    const moment = moments[shared()];
    document.querySelector(".moment").textContent = moment ? `Both at: ${moment.said}` : "Each at a moment of its own";
  };
  tell();
  for (const stepper of steppers) stepper.place.addEventListener("shown", tell);
  for (const button of document.querySelectorAll("[data-both]")) {
    button.addEventListener("click", () => goBoth(Number(button.dataset.both)));
  }

  const ways = { n: 1, p: -1 };
  const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", " ": "play" };
  document.addEventListener("keydown", (event) => {
    const go = keys[event.key];
    const focus = document.activeElement;
    const inside = focus.closest(".stepper, .switch");
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in ways) goBoth(ways[event.key]);
    if (!go) return;
    // Home, End and space scroll the page, unless a step is in focus. A button takes the space itself, a slider arrows.
    if (!inside && (focus !== document.body || !event.key.startsWith("Arrow"))) return;
    if (event.key === " " && focus.matches("button, a")) return;
    if (event.key !== " " && focus.matches("input")) return;
    event.preventDefault();
    active.go(go);
  });
}

class Stepper {
  constructor(place, steps) {
    this.place = place;
    this.side = place.dataset.side;
    this.most = steps.most;
    Object.assign(this, steps[this.side]); // events, buckets
    this.slider = place.querySelector("input");
    this.slider.max = this.events.length - 1;
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.table = new Table(place.querySelector(".ranks"), this.buckets, this.events[0].cells.length);
    for (const button of place.querySelectorAll("[data-go]")) {
      button.addEventListener("click", () => this.go(button.dataset.go));
    }
    this.timer = null;
    this.show(0);
  }

  go(where) {
    const last = this.events.length - 1;
    if (where === "play") return this.timer === null ? this.play() : this.stop();
    this.stop();
    const to = { first: 0, last: last, back: this.at - 1, next: this.at + 1 }[where];
    return this.show(Math.min(last, Math.max(0, to)));
  }

  play() {
    if (this.at === this.events.length - 1) this.show(0);
    this.timer = setInterval(() => {
      this.show(this.at + 1);
      if (this.at === this.events.length - 1) this.stop();
    }, PAUSE);
    this.part("[data-go=play]").textContent = "Pause";
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.part("[data-go=play]").textContent = "Play";
  }

  part(selector) {
    return this.place.querySelector(selector);
  }

  show(number) {
    const event = this.events[number];
    this.at = number;
    this.slider.value = number;
    const when = event.phase === "before" ? "before the step" : event.phase;
    this.part(".count").textContent = `Event ${number + 1} of ${this.events.length}, ${when}`;
    this.slider.setAttribute("aria-valuetext", this.part(".count").textContent);
    this.part(".sentence").innerHTML = event.text;
    for (const what of ["sent", "held"]) {
      this.part(`b.${what}`).textContent = bytes(event[what]);
      this.part(`progress.${what}`).value = event[what] / this.most[what];
      this.part(`progress.${what}`).setAttribute("aria-label", `${what}: ${bytes(event[what])}`);
    }
    this.table.show(event);
    this.mark(event);
    this.place.dispatchEvent(new Event("shown"));
  }

  // The lines of code that an event comes from, here and in the code above.
  mark(event) {
    for (const line of document.querySelectorAll(`.${this.side} .line.now`)) line.classList.remove("now");
    const cause = this.part(".cause");
    const [first, last] = event.lines;
    cause.replaceChildren();
    if (!first) return;
    const lines = [];
    for (let n = first; n <= last; n += 1) lines.push(document.getElementById(`${this.side}-${n}`));
    for (const line of lines) line.classList.add("now");
    const link = document.createElement("a");
    link.href = `#${lines[0].id}`;
    link.innerHTML = "<span></span><code></code>";
    link.querySelector("span").textContent = `${event.method}, line ${first}${last > first ? ` to ${last}` : ""}: `;
    link.querySelector("code").textContent = event.code;
    link.addEventListener("click", (click) => {
      click.preventDefault();
      for (let box = lines[0].closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
      // On a narrow page equal lines are shown once, in the right file only.
      const seen = lines[0].getClientRects().length ? lines[0] : lines[0].closest(".hunk");
      seen.scrollIntoView({ block: "center" });
    });
    cause.append(link);
  }
}

// Ranks beside each other, buckets below each other; in each place three rows of shards.
class Table {
  constructor(place, buckets, ranks) {
    const head = Array.from({ length: ranks }, (_, rank) => `<th scope="col">rank ${rank}</th>`).join("");
    const short = KINDS.map((kind) => `<span><span class="full">${kind}</span><span class="short">${kind[0]}</span></span>`);
    const shards = Array.from({ length: ranks }, (_, shard) => `<i class="cell">${shard}</i>`).join("");
    const cell = `<td>${KINDS.map((kind) => `<div class="shards ${kind}" role="img">${shards}</div>`).join("")}</td>`;
    const rows = buckets.map(([name, size, parts]) => `<tbody data-bucket="${name}">
      <tr><th colspan="${ranks + 1}" scope="rowgroup">${name} <span class="size">${size}${parts && `: ${parts}`}</span></th></tr>
      <tr><td class="kinds">${short.join("")}</td>${cell.repeat(ranks)}</tr></tbody>`);
    place.innerHTML = `<thead><tr><th aria-label="states"></th>${head}</tr></thead>${rows.join("")}`;
    this.bodies = [...place.querySelectorAll("tbody")];
  }

  show(event) {
    for (const body of this.bodies) {
      const name = body.dataset.bucket;
      body.classList.toggle("now", event.about.includes(name));
      const shards = body.querySelectorAll(".shards");
      event.cells.forEach((ofRank, rank) => {
        ofRank[name].forEach((states, kind) => {
          const row = shards[rank * KINDS.length + kind];
          const said = [...states].map((state, shard) => `shard ${shard} ${SAID[state]}`);
          row.setAttribute("aria-label", `${KINDS[kind]}: ${said.join(", ")}`);
          [...states].forEach((state, shard) => (row.children[shard].dataset.state = state));
        });
      });
    }
  }
}

function bytes(count) {
  const [size, unit] = count >= 1e6 ? [1e6, "MB"] : count >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${Number((count / size).toPrecision(3))} ${unit}`;
}

const data = document.getElementById("steps");
if (data) start(JSON.parse(data.textContent));
