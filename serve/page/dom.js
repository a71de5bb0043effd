// Small helpers to make elements. Text is always text, never markup.

export const byId = (id) => document.getElementById(id);

/** An HTML element; attributes that are null, undefined or false are left out. */
export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child || child === 0));
  return element;
}

/** A button that copies a text; named more fully where `label` says what. */
export function copyButton(text, label = null) {
  const button = html("button", { type: "button", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    button.removeAttribute("aria-label");
    button.textContent = done ? "Copied" : "Not allowed here";
  });
  return button;
}

/** Show some of the page's parts by id, hide others. */
export function show(ids, visible = true) {
  for (const id of [ids].flat()) byId(id).hidden = !visible;
}

export const number = (value) => value.toLocaleString("en");

/** Milliseconds in words. */
export const duration = (value) => (value < 90_000 ? `${Math.round(value / 1_000)} s` : `${Math.round(value / 60_000)} minutes`);

/** Bytes in words. */
export function bytes(value) {
  const [size, unit] = value < 1e9 ? [value / 1e6, "MB"] : [value / 1e9, "GB"];
  return `${size.toLocaleString("en", { maximumFractionDigits: size < 10 ? 2 : 0 })} ${unit}`;
}
