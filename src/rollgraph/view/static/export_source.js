// The answers that were written into an exported file. Filters and ranges, which a server would apply, are here.

export class ExportSource {
  constructor(content) {
    this.content = content;
    this.exported = content.exported;
  }

  async runs() {
    return this.content.runs;
  }

  async names(run) {
    return this.of(run).names;
  }

  async series(run, { names, x, from, to }) {
    const { series, notes } = this.of(run).series[x];
    const chosen = names.filter((name) => name in series).map((name) => [name, slice(series[name], from, to)]);
    return { series: Object.fromEntries(chosen), notes };
  }

  async phases(run, { x, from, to }) {
    const all = this.of(run).phases[x];
    const { x: positions, ...phases } = slice({ x: all.x, ...all.phases }, from, to);
    return { x: positions, phases, notes: all.notes };
  }

  async samples(run, filter) {
    const { groups, steps, notes } = this.of(run).samples;
    const textOf = ({ id, text_preview }) => this.of(run).sample[id]?.completion ?? text_preview;
    const kept = groups.filter((group) => matches(group, filter, textOf));
    const offset = filter.offset ?? 0;
    return { total: kept.length, groups: kept.slice(offset, offset + (filter.limit ?? 50)), steps, notes };
  }

  async sample(run, id) {
    return known(this.of(run).sample[id], "This sample is not in the exported file.");
  }

  async prompts(run, { q, offset = 0, limit = 50 }) {
    const { prompts, notes } = this.of(run).prompts;
    const kept = prompts.filter(({ prompt }) => contains(prompt, q));
    return { total: kept.length, prompts: kept.slice(offset, offset + limit), notes };
  }

  async prompt(run, key) {
    const { prompt, samples } = this.of(run);
    return prompt[key] ?? ofGroups(key, samples.groups);
  }

  async diagnosis(run) {
    return this.of(run).diagnosis;
  }

  async machine(run) {
    return this.of(run).machine;
  }

  async compare(ids) {
    const { config, ...rest } = this.content.compare;
    const differing = config.filter(({ values }) => new Set(ids.map((id) => JSON.stringify(values[id]))).size > 1);
    return { ...rest, config: differing };
  }

  listen() {} // an exported file does not grow

  of(run) {
    return known(this.content.data[run], "This run is not in the exported file.");
  }
}

/** A prompt of which the file holds no more than the groups in its list, which has the newest first. */
function ofGroups(key, all) {
  const groups = all.filter(({ prompt_key }) => prompt_key === key).reverse();
  if (!groups.length) throw new Error("This prompt is not in the exported file.");
  const notes = ["This file holds only the newest groups of this prompt."];
  return { key, prompt: groups[0].prompt, total: groups.length, groups, notes };
}

function known(value, otherwise) {
  if (value === undefined) throw new Error(otherwise);
  return value;
}

/** The part of some columns in which x lies between two values. */
function slice(columns, from, to) {
  const low = from === undefined || from === "" ? -Infinity : Number(from);
  const high = to === undefined || to === "" ? Infinity : Number(to);
  const inside = (_, index) => columns.x[index] >= low && columns.x[index] <= high;
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values?.filter(inside) ?? values]));
}

function matches(group, { step, group: number, kind, finish, reward_min, reward_max, q }, textOf) {
  if (given(step) && group.step !== Number(step)) return false;
  if (given(number) && group.group !== Number(number)) return false;
  if (given(kind) && group.kind !== kind) return false;
  return group.samples.some((sample) => {
    if (given(finish) && !(finish === "error" ? sample.failed : sample.finish === finish)) return false;
    if (given(reward_min) && !(sample.reward >= Number(reward_min))) return false;
    if (given(reward_max) && !(sample.reward <= Number(reward_max))) return false;
    return contains(group.prompt, q) || contains(textOf(sample), q);
  });
}

function given(value) {
  return value !== undefined && value !== null && value !== "";
}

function contains(text, q) {
  return !given(q) || text.toLowerCase().includes(q.toLowerCase());
}
