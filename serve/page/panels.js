// The drawers of a narrow screen: the conversations and the memory.

import { byId } from "./dom.js";

const PANELS = ["list", "memory"];

function openPanel(name) {
  const panel = byId(`${name}-panel`);
  panel.classList.add("open");
  panel.role = "dialog";
  panel.ariaModal = "true";
  byId(`${name}-open`).setAttribute("aria-expanded", "true");
  byId("main").inert = true;
  byId(`${name}-close`).focus();
}

/** Close what is open; whether anything was. */
export function closePanels() {
  const open = PANELS.filter((name) => byId(`${name}-panel`).classList.contains("open"));
  byId("main").inert = false;
  for (const name of open) {
    const panel = byId(`${name}-panel`);
    panel.classList.remove("open");
    panel.role = "complementary";
    panel.ariaModal = null;
    byId(`${name}-open`).setAttribute("aria-expanded", "false");
    byId(`${name}-open`).focus();
  }
  return open.length > 0;
}

for (const name of PANELS) {
  byId(`${name}-open`).addEventListener("click", () => openPanel(name));
  byId(`${name}-close`).addEventListener("click", closePanels);
}
addEventListener("click", ({ target }) => { // beside a drawer
  if (target === document.documentElement || target === document.body) closePanels();
});
matchMedia("(max-width: 1100px)").addEventListener("change", closePanels);
matchMedia("(max-width: 760px)").addEventListener("change", closePanels);
