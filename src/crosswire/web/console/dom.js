// Builds elements. Text is only ever set as text, and attributes one by one: what peers wrote
// can't become markup, whatever it contains.

const SVG = "http://www.w3.org/2000/svg";
const SAFE_LINK = /^(#|\/(?!\/)|https?:\/\/)/;

/**
 * An element. `attributes`: `class`, `on…` with a function, true for an attribute without value,
 * false or null for none; `value`, `checked`, `disabled` and the like are set as properties.
 * Children are elements, texts, numbers, lists of them, or null for nothing.
 */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Like `el`, for a part of a picture. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "indeterminate", "open"]);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "href" && !SAFE_LINK.test(value)) throw new Error(`no link: ${value}`);
    else if (PROPERTIES.has(name) && element.namespaceURI !== SVG) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** Appends children, as `el` takes them. */
export function add(element, ...children) {
  append(element, children);
  return element;
}

/** Replaces what an element contains. */
export function put(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A paragraph-like message that screen readers announce. `kind`: info, good, warn or bad. */
export function notice(kind, ...children) {
  return el("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, children);
}

/** What a screen or table shows when there is nothing: a title, and what to do next. */
export function emptyState(title, ...children) {
  return el("div", { class: "empty" }, el("p", { class: "empty-title" }, title),
    el("div", {}, children));
}

/** A figure with its label and a note; `link` leads to more, `kind`: warn or bad. */
export function tile(label, value, note = "", link = null, kind = "") {
  return el(link ? "a" : "div", { class: `tile ${kind}`, href: link }, el("span", { class: "tile-label" }, label),
    el("span", { class: "tile-value" }, value), el("span", { class: "tile-note" }, note));
}

let lastId = 0;

/** A new id for an element that another refers to. */
export function uniqueId(prefix = "id") {
  lastId += 1;
  return `${prefix}-${lastId}`;
}
