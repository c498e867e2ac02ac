// The page: opens the run and the view that the address names, and passes on what the server says has grown.

import { Compare } from "./compare.js";
import { source } from "./data.js";
import { Diagnosis } from "./diagnosis.js";
import { empty, fill } from "./dom.js";
import { Machine } from "./machine.js";
import { Overview } from "./overview.js";
import { readRoute } from "./route.js";
import { Samples } from "./samples.js";
import { Shell } from "./shell.js";
import { startShortcuts } from "./shortcuts.js";
import { startTheme } from "./theme.js";

// A view is made with {run, runs, params, note} and has: `element`, `ready` (a promise), `update(params)` when its part
// of the address changes, `grown(runs)` when its run has grown, `close()`.
const VIEWS = { overview: Overview, samples: Samples, diagnosis: Diagnosis, compare: Compare, machine: Machine };

const GONE = "The folder of this run is gone. The page shows the data that was read last.";

class App {
  constructor() {
    this.shell = new Shell(source.exported);
    this.view = null;
    this.opened = "";
    this.unknown = []; // a note on the run in the address, if there is none of its name
    this.waiting = new Set(); // ids of runs that have grown
    this.working = false;
    document.body.append(this.shell.element);
  }

  async start() {
    await this.loadRuns();
    addEventListener("hashchange", () => this.show());
    source.listen(
      (event) => this.grown(event),
      (connected) => this.shell.showConnection(connected),
    );
    this.show();
  }

  async loadRuns() {
    const { runs, notes } = await source.runs();
    this.runs = runs;
    this.runNotes = notes;
  }

  show() {
    const { view, params } = readRoute();
    const named = this.runs.find(({ id }) => id === params.run);
    const run = named ?? this.runs[0];
    if (!run) {
      fill(this.shell.main, empty("There is no run yet", "The page fills as soon as the folder has a run in it."));
      this.shell.note(this.runNotes);
      return;
    }
    this.run = run;
    this.shell.showRun(this.runs, run, view);
    const opened = `${view} ${run.id}`;
    if (opened === this.opened) this.guard(() => this.view.update(params));
    else this.open(opened, view, run, params);
    this.unknown = params.run && !named ? [`There is no run ${params.run} here. This is ${run.name}.`] : [];
    this.shell.note(this.unknown);
  }

  open(opened, view, run, params) {
    this.view?.close();
    this.opened = opened;
    this.shell.clearNotes();
    this.shell.note(this.runNotes);
    this.view = new VIEWS[view]({ run, runs: this.runs, params, note: (notes) => this.shell.note(notes) });
    fill(this.shell.main, this.view.element);
    this.guard(() => this.view.ready);
  }

  /** A request that fails leaves a note; the page stays. */
  async guard(action) {
    try {
      await action();
    } catch (error) {
      this.shell.note([error.message]);
    }
  }

  /** Something has grown. What comes while the last event is worked on is one more event, however often it comes. */
  async grown({ run, size, status, first }) {
    const known = this.runs.find(({ id }) => id === run);
    if (first && known?.size === size && known.status === status) return;
    this.waiting.add(run);
    if (this.working) return;
    this.working = true;
    while (this.waiting.size) {
      const ids = new Set(this.waiting);
      this.waiting.clear();
      await this.guard(() => this.follow(ids));
    }
    this.working = false;
  }

  async follow(ids) {
    await this.loadRuns();
    if (!this.view) {
      this.show();
      return;
    }
    const run = this.runs.find(({ id }) => id === this.run.id);
    if (!run) {
      this.shell.note([GONE]);
      return;
    }
    this.run = run;
    this.shell.showRun(this.runs, run, readRoute().view);
    if (!ids.has(this.run.id) && !(this.view instanceof Compare)) return;
    await this.shell.renewNotes(() => {
      this.shell.note([...this.runNotes, ...this.unknown]);
      return this.view.grown(this.runs);
    });
  }
}

startTheme();
startShortcuts();
const app = new App();
app.start().catch((error) => fill(app.shell.main, empty("The page has no data", error.message)));
