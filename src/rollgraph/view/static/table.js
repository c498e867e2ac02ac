// Tables that scroll sideways where there is no room.

import { h } from "./dom.js";

// Heads of columns with numbers, which stand on the right.
const NUMBERS = new Set([
  "Operations",
  "Memory",
  "Captures",
  "Replays",
  "Eager runs",
  "Planned",
  "Measured",
  "Step time",
  "Own time",
  "Peak memory",
  "Size",
]);

export function table(head, rows) {
  const cells = head.map((text) => h("th", { scope: "col", class: NUMBERS.has(text) ? "number" : null }, text));
  return h("div", { class: "table-wrap" }, h("table", {}, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, rows)));
}
