// The API of a running server. Each method is one request; answers.py makes the answers.

export class ApiSource {
  exported = null; // when the file was written; a server has no such time

  runs() {
    return request("runs");
  }

  names(run) {
    return request(`${at(run)}/names`);
  }

  series(run, { names, x, from, to, points }) {
    return request(`${at(run)}/series`, { names: names.join("\n"), x, from, to, points });
  }

  phases(run, { x, from, to, points }) {
    return request(`${at(run)}/phases`, { x, from, to, points });
  }

  samples(run, filter) {
    return request(`${at(run)}/samples`, filter);
  }

  sample(run, id) {
    return request(`${at(run)}/samples/${encodeURIComponent(id)}`);
  }

  prompts(run, { q, offset, limit }) {
    return request(`${at(run)}/prompts`, { q, offset, limit });
  }

  /** All groups of a prompt, which the server gives in pages. */
  async prompt(run, key) {
    const path = `${at(run)}/prompts/${encodeURIComponent(key)}`;
    const answer = await request(path);
    while (answer.groups.length < answer.total) {
      const page = await request(path, { offset: answer.groups.length });
      if (!page.groups.length) break;
      answer.groups.push(...page.groups);
    }
    return answer;
  }

  async groupsOfPrompt(run, key) {
    const { total } = await request(`${at(run)}/prompts/${encodeURIComponent(key)}`, { limit: 1 });
    return total;
  }

  diagnosis(run) {
    return request(`${at(run)}/diagnosis`);
  }

  machine(run) {
    return request(`${at(run)}/machine`);
  }

  compare(ids) {
    return request("compare", { ids: ids.join(",") });
  }

  /**
   * Calls `grown({run, size, status, first})` when files of a run grew, and `connected(true|false)` when the server
   * comes or goes. After each connection comes the size of every run at first. A tab out of sight does not listen:
   * browsers keep few connections to one server, and some open tabs would take them all.
   */
  listen(grown, connected) {
    let events = null;
    const follow = () => {
      events?.close();
      events = null;
      if (document.hidden) return;
      events = new EventSource("api/events");
      events.onmessage = (event) => grown(JSON.parse(event.data));
      events.onopen = () => connected(true);
      events.onerror = () => connected(false);
    };
    document.addEventListener("visibilitychange", follow);
    follow();
  }
}

function at(run) {
  return `runs/${encodeURIComponent(run)}`;
}

async function request(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  const response = await fetch(`api/${path}${query ? `?${query}` : ""}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? `The server answered with status ${response.status}.`);
  return answer;
}
