// Small builders for HTML and SVG elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

// Sets an element's children, unless they would look the same: this keeps a focused row or a
// selected text.
export function show(element, ...children) {
  const fresh = children.flat();
  const before = [...element.childNodes];
  if (before.length === fresh.length && before.every((node, i) => node.isEqualNode(asNode(fresh[i])))) return;
  element.replaceChildren(...fresh);
}

function asNode(child) {
  return typeof child === "string" ? document.createTextNode(child) : child;
}
