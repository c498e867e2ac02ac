// Keys that work everywhere. Keys of a list or a chart belong to it.

import { h } from "./dom.js";
import { VIEWS, go, readRoute } from "./route.js";
import { toggle } from "./theme.js";

const HELP = [
  ["1 … 5", "Go to a view"],
  ["/", "Search samples"],
  ["↑ ↓", "Next or previous group, in the list of samples"],
  ["← →", "Better or worse sample of a group; values of a chart or numbers of coloured tokens that have the focus"],
  ["d", "Light or dark"],
  ["?", "This list"],
];

export function startShortcuts() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isBusy(event.target)) return;
    const action = actionOf(event.key);
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function actionOf(key) {
  const view = VIEWS[Number(key) - 1];
  if (view) return () => go(view, { run: readRoute().params.run });
  return { "/": focusSearch, "?": showHelp, d: toggle }[key];
}

/** Somebody types, or reads the list of keys. */
function isBusy(target) {
  return target.matches?.("input, select, textarea") || document.querySelector("dialog[open]");
}

function focusSearch() {
  const search = document.querySelector("input[type=search]");
  if (search) search.focus();
  else {
    go("samples", { run: readRoute().params.run });
    setTimeout(() => document.querySelector("input[type=search]")?.focus(), 100);
  }
}

export function showHelp() {
  const rows = HELP.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  const close = h("button", { type: "button", on: { click: () => dialog.close() } }, "Close");
  const dialog = h(
    "dialog",
    { "aria-label": "Keyboard shortcuts" },
    h("h2", {}, "Keyboard"),
    h("dl", { class: "keys" }, rows),
    close,
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
