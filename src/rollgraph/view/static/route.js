// The address: `#/samples?run=mine&step=12` names a view and its state, so that a link shows what its sender saw.

export const VIEWS = ["overview", "samples", "diagnosis", "compare", "machine"];

export function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const view = VIEWS.includes(path) ? path : VIEWS[0];
  return { view, params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** The address of a view. Empty values are left out. */
export function linkTo(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString();
  return query ? `#/${view}?${query}` : `#/${view}`;
}

export function go(view, params) {
  location.hash = linkTo(view, params);
}

/** Changes some of the state of the current view. `replace` leaves no entry in the browser's history. */
export function change(changes, { replace = false } = {}) {
  const { view, params } = readRoute();
  const address = linkTo(view, { ...params, ...changes });
  if (address === location.hash) return;
  if (!replace) {
    location.hash = address;
    return;
  }
  history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}
