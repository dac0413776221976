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

const KINDS = ["parameters", "gradients", "optimizer", "second"]; // as cells have them
const ROWS = [0, 3, 1, 2]; // as they are shown: secondary shards, if there are any, after the parameters
const SAID = {
  ".": "not held", r: "buffer, still empty", o: "its own gradients", t: "in flight", h: "held", n: "held, stepped",
  q: "held, rounded", s: "out of date",
};
const METERS = [ // of an event, in the order shown
  ["sent", "sent so far"], ["left", "left the node"], ["held", "held now"], ["to_host", "down the bus"],
  ["to_device", "up the bus"], ["read", "read from disk"], ["write", "written"], ["host", "on the host"], ["disk", "on disk"],
];
const PAUSE = 1500; // milliseconds between events that play by themselves

function start(steps) {
  const steppers = [...document.querySelectorAll(".stepper")].map((place) => new Stepper(place, steps));
  let active = steppers[1]; // the one that keys step: the last used

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
    Object.assign(this, steps[this.side]); // events, buckets, areas, perNode
    this.most = { ...steps.most };
    // What either engine counts, so that both have the same meters.
    const counts = (what) => (what in this.most || what in this.events[0]) && (this.perNode || what !== "left");
    this.meters = METERS.filter(([what]) => counts(what));
    for (const [what] of this.meters) this.most[what] ??= Math.max(...this.events.map((event) => event[what]));
    this.part(".meters").innerHTML = this.meters.map(([what, said]) =>
      `<span>${said} <b class="${what}"></b></span><progress class="${what}" max="1"></progress>`).join("");
    this.part(".meters").classList.toggle("many", this.meters.length > 3);
    this.slider = place.querySelector("input");
    this.slider.max = this.events.length - 1;
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.table = new Table(place.querySelector(".ranks"), this);
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
    for (const [what, said] of this.meters) {
      const count = event[what] ?? 0; // of what this engine has none of
      this.part(`b.${what}`).textContent = bytes(count);
      this.part(`progress.${what}`).value = count / (this.most[what] || 1);
      this.part(`progress.${what}`).setAttribute("aria-label", `${said}: ${bytes(count)}`);
    }
    this.table.show(event);
    this.mark(event);
    this.place.dispatchEvent(new Event("shown"));
  }

  // The lines of code behind an event, here and in the code above.
  mark(event) {
    for (const line of this.marked ?? []) line.classList.remove("now");
    this.marked = [];
    const cause = this.part(".cause");
    const [first, last] = event.lines;
    cause.replaceChildren();
    if (!first) return;
    const lines = this.marked;
    const side = event.inherited ? "before" : this.side; // an inherited method is in the other file
    for (let n = first; n <= last; n += 1) lines.push(document.getElementById(`${side}-${n}`));
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

// Ranks side by side, in their nodes; buckets one below the other. In each place a row of shards for each kind of
// state and, after the device's, a cell for the rank's own shard on the host and on disk.
class Table {
  constructor(place, { buckets, areas, perNode, events }) {
    const ranks = events[0].cells.length;
    const kinds = ROWS.filter((kind) => kind < events[0].cells[0][buckets[0][0]].length);
    const all = Array.from({ length: ranks }, (_, rank) => rank);
    const opens = (rank) => (perNode && rank % perNode === 0 ? ' class="opens"' : "");
    const both = (full, short) => `<span class="full">${full}</span><span class="short">${short}</span>`;
    const beside = areas.slice(1);
    const where = beside.length ? `<span class="areas"><span>device</span>${
      beside.map((area) => `<span class="beside">${both(area, area[0])}</span>`).join("")}</span>` : "";
    const head = all.map((rank) => `<th scope="col"${opens(rank)}>rank ${rank}${where}</th>`).join("");
    const nodes = perNode ? `<tr class="nodes"><td></td>${all.filter((rank) => rank % perNode === 0).map((rank) =>
      `<th scope="colgroup" colspan="${perNode}" class="opens">node ${rank / perNode}</th>`).join("")}</tr>` : "";
    const names = kinds.map((kind) => `<span>${both(KINDS[kind], KINDS[kind][0])}</span>`).join("");
    const cell = (rank) => `<td${opens(rank)}>${kinds.map((kind) => `<div class="shards ${KINDS[kind]}" data-kind="${kind}" role="img">${
      all.map((shard) => `<i class="cell">${shard}</i>`).join("")}${
      beside.map(() => `<i class="cell beside">${rank}</i>`).join("")}</div>`).join("")}</td>`;
    const rows = buckets.map(([name, size, parts]) => `<tbody data-bucket="${name}">
      <tr><th colspan="${ranks + 1}" scope="rowgroup">${name} <span class="size">${size}${parts && `: ${parts}`}</span></th></tr>
      <tr><td class="kinds">${names}</td>${all.map(cell).join("")}</tr></tbody>`);
    place.innerHTML = `<thead>${nodes}<tr><th aria-label="states"></th>${head}</tr></thead>${rows.join("")}`;
    place.classList.toggle("tiers", beside.length > 0);
    this.bodies = [...place.querySelectorAll("tbody")];
    this.places = [...all.map((shard) => `shard ${shard}`), ...beside.map((area) => `on the ${area}`)];
    this.kinds = kinds;
  }

  show(event) {
    for (const body of this.bodies) {
      const name = body.dataset.bucket;
      body.classList.toggle("now", event.about.includes(name));
      const shards = body.querySelectorAll(".shards");
      event.cells.forEach((ofRank, rank) => {
        this.kinds.forEach((kind, row) => {
          const place = shards[rank * this.kinds.length + row];
          const states = [...ofRank[name][kind]];
          const said = states.map((state, number) => `${this.places[number]} ${SAID[state]}`);
          place.setAttribute("aria-label", `${KINDS[kind]}: ${said.join(", ")}`);
          states.forEach((state, number) => (place.children[number].dataset.state = state));
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
