// Numbers, durations and sizes as people read them.

const MINUS = "\u2212";
const ABSENT = "\u2013";

export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return ABSENT;
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : `${MINUS}\u221e`;
  return withMinus(plainNumber(value));
}

function plainNumber(value) {
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // what smoothing leaves of something that is over
  if (size >= 1e6) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
  if (size >= 1000) return formatCount(value);
  if (size < 1e-3) return Number(value.toPrecision(2)).toExponential();
  return String(Number(value.toPrecision(3)));
}

/** A number beside an axis, where there is little room: "15K". */
export function formatTick(value) {
  if (Math.abs(value) < 10_000) return formatNumber(value);
  return new Intl.NumberFormat("en", { notation: "compact" }).format(value);
}

export function formatSigned(value) {
  if (value === null || value === undefined) return ABSENT;
  return value > 0 ? `+${formatNumber(value)}` : formatNumber(value);
}

export function formatCount(value) {
  return new Intl.NumberFormat("en", { maximumFractionDigits: 0 }).format(value);
}

function withMinus(text) {
  return text.replace(/^-/, MINUS).replace("e-", `e${MINUS}`).replace("e+", "e");
}

/** Two units at most: "3 h 12 min", "41 s", "0.8 s". */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return ABSENT;
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return joinUnits(hours, "h", minutes % 60, "min");
  return joinUnits(Math.floor(hours / 24), "d", hours % 24, "h");
}

function joinUnits(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** Seconds on an axis, where neighbours must differ: "0:40", "1:05:00". */
export function formatClock(seconds) {
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const digits = parts.map((part, index) => (index ? String(part).padStart(2, "0") : String(part)));
  if (parts[0]) return digits.join(":");
  return `${parts[1]}:${digits[2]}`;
}

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return ABSENT;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = bytes;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${Number(size.toPrecision(3))} ${units[unit]}`;
}

export function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** A value of a configuration, as YAML would write it on one line. */
export function formatValue(value) {
  if (value === null) return "null";
  if (value === undefined) return ABSENT;
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
