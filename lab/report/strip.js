"use strict";

// The token strip: which tokens of a prompt the heads still hold, for one policy, budget and layer.
// Reads the JSON of `kvcap analyze kept` in this page; text goes in as text, never as markup.
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const { pieces, layers, kv_heads: heads, runs } = data;
  const strip = find("strip");
  const number = (n) => n.toLocaleString("en");
  let chosen = runs[0];
  let layer = -1; // an index, or -1 for all layers together
  let here = -1; // the token that is pointed at

  const visible = (piece) => {
    const found = piece.replace(/\t/g, "→\t").replace(/\n/g, "↵\n");
    return found || "·"; // another part of the character before it
  };
  const spoken = (piece) => {
    const word = piece.trim();
    if (word) return word;
    return piece.includes("\n") ? "new line" : piece ? "space" : "part of a character";
  };
  const held = (i) => {
    if (layer >= 0) return chosen.heads[layer][i];
    return chosen.heads.reduce((sum, row) => sum + row[i], 0);
  };
  const most = () => (layer >= 0 ? heads : heads * layers.length);
  const step = (count, all) => (count === 0 ? 0 : Math.ceil((5 * count) / all));

  const tokens = pieces.map((piece, i) => {
    const span = document.createElement("span");
    span.id = `token-${i}`;
    span.setAttribute("role", "option");
    span.textContent = visible(piece);
    return span;
  });
  strip.append(...tokens);

  const fill = (select, options) => {
    select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  };
  const once = (values) => [...new Set(values)];

  const budgets = () => {
    const known = runs.filter((run) => run.policy === find("policy").value);
    const before = find("budget").value;
    fill(find("budget"), once(known.map((run) => String(run.budget))).map((b) => [b, number(+b)]));
    if (known.some((run) => String(run.budget) === before)) find("budget").value = before;
  };

  const describe = (i) => {
    if (i < 0) return;
    const count = held(i);
    const where = layer >= 0 ? `of layer ${layers[layer]}` : "of all layers";
    find("said").textContent =
      `Token ${number(i + 1)} of ${number(pieces.length)}, “${spoken(pieces[i])}”: ` +
      `held by ${count} of ${number(most())} heads ${where}.`;
    find("layers").replaceChildren(
      ...chosen.heads.map((row, j) => {
        const item = document.createElement("li");
        item.className = `s${step(row[i], heads)}`;
        item.textContent = `${layers[j]}: ${row[i]}/${heads}`;
        return item;
      }),
    );
  };

  const show = () => {
    const all = most();
    let gone = 0;
    tokens.forEach((span, i) => {
      const count = held(i);
      gone += count === 0;
      span.className = `token s${step(count, all)}${i === here ? " here" : ""}`;
      span.setAttribute("aria-label", `${spoken(pieces[i])}: ${count} of ${all}`);
    });
    const where = layer >= 0 ? `layer ${layers[layer]}` : "any layer";
    find("summary").textContent =
      `${chosen.policy}, ${number(chosen.budget)} slots: ${number(pieces.length - gone)} of ` +
      `${number(pieces.length)} tokens are held by a head of ${where}.`;
    describe(here);
  };

  const point = (i, scroll) => {
    if (i < 0 || i >= tokens.length) return;
    if (here >= 0) {
      tokens[here].classList.remove("here");
      tokens[here].removeAttribute("aria-selected");
    }
    here = i;
    tokens[i].classList.add("here");
    tokens[i].setAttribute("aria-selected", "true");
    strip.setAttribute("aria-activedescendant", tokens[i].id);
    if (scroll) tokens[i].scrollIntoView({ block: "nearest" });
    describe(i);
  };

  const pick = () => {
    const [policy, budget] = [find("policy").value, find("budget").value];
    chosen = runs.find((run) => run.policy === policy && String(run.budget) === budget);
    layer = Number(find("layer").value);
    show();
  };

  fill(find("policy"), once(runs.map((run) => run.policy)).map((p) => [p, p]));
  fill(find("layer"), [["-1", "all layers"], ...layers.map((n, j) => [String(j), `layer ${n}`])]);
  budgets();
  find("policy").addEventListener("change", () => {
    budgets();
    pick();
  });
  find("budget").addEventListener("change", pick);
  find("layer").addEventListener("change", pick);

  const moves = {
    ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20,
  };
  strip.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    let to;
    if (event.key in moves) to = here < 0 ? 0 : here + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = tokens.length - 1;
    else return;
    event.preventDefault();
    point(Math.min(Math.max(to, 0), tokens.length - 1), true);
  });
  strip.addEventListener("focus", () => point(Math.max(here, 0), true));
  const under = (event) => {
    const span = event.target.closest("#strip > span");
    if (span) point(tokens.indexOf(span), false);
  };
  strip.addEventListener("pointerover", under);
  strip.addEventListener("click", under);

  for (const id of ["controls", "hint", "strip", "detail"]) find(id).hidden = false;
  pick();
})();
