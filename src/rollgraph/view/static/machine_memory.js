// The memory of each phase beside what was planned for it, what the plan is made of, and what was chosen for it.

import { h } from "./dom.js";
import { formatBytes, formatValue } from "./format.js";
import { table } from "./table.js";

export function hasMemory({ planned, measured }) {
  return planned !== null || Object.keys(measured).length > 0;
}

export function memorySection({ planned: plan, measured }) {
  const onCpu = plan?.device === "cpu";
  const limit = onCpu ? null : plan?.device_bytes; // of a machine that other programs use, too
  const planned = plan ? { ...plan.phases, peak: plan.peak } : {};
  const names = new Set([...Object.keys(planned), ...Object.keys(measured)]);
  names.delete("peak");
  const phases = [...names, "peak"];
  const most = Math.max(1, limit ?? 0, ...Object.values(planned), ...Object.values(measured));
  const rows = phases.map((phase) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, phase),
      h("td", { class: "bars" }, bar(planned[phase], most, "planned"), bar(measured[phase], most, "measured")),
      h("td", { class: "number" }, formatBytes(planned[phase])),
      h("td", { class: "number" }, formatBytes(measured[phase])),
    ),
  );
  const key = ["planned", "measured"].map((kind) =>
    h("span", { class: "key" }, h("i", { class: `swatch ${kind}` }), kind),
  );
  const heading = h(
    "h2",
    {},
    "Memory by phase",
    h("span", { class: "quiet" }, limit && `${formatBytes(limit)} were free `, key),
  );
  return h(
    "section",
    {},
    heading,
    table(["Phase", "", "Planned", "Measured"], rows),
    onCpu && h("p", { class: "quiet below" }, "Measured memory includes Python and its libraries."),
    plan?.reasons.length > 0 && choices(plan.reasons),
    plan && planLines(plan.lines),
  );
}

/** What the run chose by itself so that it fits. */
function choices(reasons) {
  const rows = reasons.map(({ key, value, reason }) =>
    h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, formatValue(value)), h("td", {}, reason)),
  );
  return h(
    "details",
    { class: "more-about" },
    h("summary", {}, "What was chosen, and why"),
    table(["Key", "Value", "Reason"], rows),
  );
}

/** What the plan is made of, largest first. */
function planLines(lines) {
  const sorted = [...lines].sort((a, b) => b.nbytes - a.nbytes);
  const rows = sorted.map(({ name, nbytes, where, phases }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      h("td", {}, where),
      h("td", {}, phases.join(", ")),
      h("td", { class: "number" }, formatBytes(nbytes)),
    ),
  );
  return h(
    "details",
    { class: "more-about" },
    h("summary", {}, "What the plan holds"),
    table(["Part", "Where", "Phases", "Size"], rows),
  );
}

function bar(value, most, kind) {
  if (value === undefined || value === null) return null;
  return h("i", {
    class: `bar-line ${kind}`,
    title: `${kind} ${formatBytes(value)}`,
    style: { "--part": `${(value / most) * 100}%` },
  });
}
