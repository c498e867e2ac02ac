// The frame around every view: the run, its progress, the way from view to view, and notes.

import { fill, h, iconButton, select } from "./dom.js";
import { formatCount, formatDuration, plural } from "./format.js";
import { VIEWS, go, linkTo, readRoute } from "./route.js";
import { showHelp } from "./shortcuts.js";
import { themeSwitch } from "./theme.js";

const LABELS = {
  overview: "Overview",
  samples: "Samples",
  diagnosis: "Diagnosis",
  compare: "Compare",
  machine: "Machine",
};

export class Shell {
  constructor(exported) {
    this.picker = h("div", { class: "picker" });
    this.progress = h("div", { class: "progress", role: "status" });
    this.bar = h("div", { class: "bar" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Views" });
    this.notes = h("ul", { class: "notes", "aria-live": "polite" });
    this.said = new Set(); // kinds of notes, since they were last renewed
    this.offline = h(
      "p",
      { class: "banner", hidden: true },
      "The server does not answer: `rollgraph view` starts it again. The page shows its last answer.",
    );
    this.main = h("main", { id: "main", tabindex: "-1" });
    const snapshot = exported && h("span", { class: "tag" }, `exported ${new Date(exported * 1000).toLocaleString()}`);
    const help = iconButton("?", "Keyboard shortcuts", showHelp);
    this.element = h(
      "div",
      { class: "page" },
      h("a", { class: "skip", href: "#main", on: { click: (event) => this.skip(event) } }, "Skip to the content"),
      h(
        "header",
        {},
        h(
          "div",
          { class: "top" },
          h("span", { class: "brand" }, "rollgraph"),
          this.picker,
          this.progress,
          snapshot,
          help,
          themeSwitch(),
        ),
        this.tabs,
        this.bar,
      ),
      this.offline,
      this.notes,
      this.main,
    );
  }

  skip(event) {
    event.preventDefault(); // the address holds the state of the page
    this.main.focus();
  }

  showRun(runs, run, view) {
    document.title = `${run.name} · rollgraph`;
    this.showPicker(runs, run);
    this.showProgress(run);
    const here = readRoute().view;
    const tabs = VIEWS.map((name) =>
      h(
        "a",
        { href: linkTo(name, { run: runs.length > 1 ? run.id : "" }), "aria-current": name === here ? "page" : null },
        LABELS[name],
      ),
    );
    if (this.tabs.dataset.shown !== `${run.id} ${view}`) fill(this.tabs, tabs);
    this.tabs.dataset.shown = `${run.id} ${view}`;
  }

  showPicker(runs, run) {
    const shown = runs.map(({ id }) => id).join("\n") + run.id;
    if (this.picker.dataset.shown === shown) return; // an open list is not taken away from under the pointer
    this.picker.dataset.shown = shown;
    const options = runs.map(({ id, name }) => [id, name]);
    const single = h("span", { class: "run-name", title: run.path }, run.name);
    fill(
      this.picker,
      runs.length > 1 ? select("Run", options, run.id, (id) => go(readRoute().view, { run: id })) : single,
    );
  }

  showProgress(run) {
    const known = run.steps > 0;
    const taken = (run.step ?? -1) + 1; // steps are numbered from 0
    const share = known ? Math.min(taken / run.steps, 1) : 0;
    const steps = known ? `${formatCount(taken)} of ${formatCount(run.steps)} steps` : plural(taken, "step");
    const left = run.status === "running" && run.seconds_left !== null && `${formatDuration(run.seconds_left)} left`;
    this.bar.style.setProperty("--share", String(share));
    this.bar.dataset.status = run.status;
    fill(
      this.progress,
      h("span", { class: "status", data: { status: run.status } }, run.status),
      h("span", { class: "steps" }, steps),
      left && h("span", { class: "left" }, left),
    );
  }

  showConnection(connected) {
    this.offline.hidden = connected;
  }

  note(notes = []) {
    for (const text of notes) {
      const kind = withoutNumbers(text);
      this.said.add(kind);
      const same = [...this.notes.children].find((item) => withoutNumbers(item.textContent) === kind);
      if (!same) this.notes.append(h("li", {}, text));
      else if (same.textContent !== text) same.textContent = text;
    }
  }

  /** Notes that are not given again while a view reads its run anew no longer hold. */
  async renewNotes(read) {
    this.said.clear();
    await read();
    for (const item of [...this.notes.children]) {
      if (!this.said.has(withoutNumbers(item.textContent))) item.remove();
    }
  }

  clearNotes() {
    this.notes.replaceChildren();
  }
}

/** Two notes that differ in a number only are one note at two times. */
function withoutNumbers(text) {
  return text.replace(/\d[\d,.]*/g, "#");
}
