// Builds elements. Text becomes text nodes and nothing else: no string is ever parsed as markup.

/**
 * An element with attributes and children: h("p", { class: "quiet", on: { click } }, "Text ", h("b", {}, "more")).
 * `on` holds listeners, `style` CSS properties, `data` data attributes. Null, false and undefined are left out.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") listen(element, value);
    else if (name === "style") setStyles(element, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function listen(element, listeners) {
  for (const [event, listener] of Object.entries(listeners)) element.addEventListener(event, listener);
}

function setStyles(element, styles) {
  for (const [property, value] of Object.entries(styles)) element.style.setProperty(property, value);
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Like `fill`, for controls that are made anew: the one at the same place keeps the focus. */
export function refill(element, ...children) {
  const controls = () => [...element.querySelectorAll("button, input, select")];
  const focused = controls().indexOf(document.activeElement);
  fill(element, ...children);
  controls()[focused]?.focus();
}

/** A row of buttons of which one is pressed. `options` are [value, label] pairs. */
export function segmented(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), on: { click: () => choose(value) } }, text),
  );
  return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

export function select(label, options, chosen, choose) {
  const items = options.map(([value, text]) => h("option", { value }, text));
  const control = h("select", { "aria-label": label, on: { change: (event) => choose(event.target.value) } }, items);
  control.value = chosen;
  return control;
}

export function iconButton(icon, label, click) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click } }, icon);
}

/** What a view shows where there is nothing to show: a heading and a sentence on what to do. */
export function empty(title, ...text) {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text));
}

export function debounce(milliseconds, action) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}
