// The page: what `prefill` makes of the run's records, drawn anew whenever a reader moves something. It stands behind
// stages.mjs and drawing.mjs in one module script.

const part = (id) => document.getElementById(id);
const data = JSON.parse(part("data").textContent);
const n = data.token_ids.length;
const m = data.offsets.length - 1;
const sizes = sizesOf(data.offsets);
const trunkOf = sizes.flatMap((size, g) => Array(size).fill(g));
const floor = data.parameters.N_sink + data.parameters.W_recent;
const STRONGEST = 150;

const settings = { tokens: data.tokens, ...data.parameters };
const chosen = { trunk: 0, token: null };
let hovered = null;
let marked = null;
let now;
const current = () => hovered ?? chosen;

// Small tools

const SVG = new Set(["rect", "path", "line", "svg", "defs", "pattern"]);

function element(name, attributes = {}, ...children) {
  const space = "http://www.w3.org/2000/svg";
  const made = SVG.has(name) ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const percent = (share) => `${Math.round(100 * share)} %`;
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

function shown(x) {
  if (Number.isNaN(x)) return "not scored";
  if (Number.isInteger(x)) return String(x);
  return Math.abs(x) < 0.001 ? x.toExponential(1) : x.toFixed(3);
}

// What is computed

/** Links between trunks a < b, the strongest first. */
function edges({ indptr, indices, weights }) {
  const rows = range(m).flatMap((a) => range(indptr[a + 1] - indptr[a]).map((at) => {
    const e = indptr[a] + at;
    return { a, b: indices[e], W: weights[e] };
  }));
  return rows.filter(({ a, b }) => a < b).sort((x, y) => y.W - x.W);
}

function compute() {
  const found = prefill(data, settings.tokens, settings);
  const lived = Array(n).fill(false);
  for (const i of found.kept) lived[i] = true;
  const order = evictionOrder(found.scores, found.isProtected).reverse();
  const line = [...range(m).filter((g) => found.isProtected[g]), ...order];
  const rank = Array(m).fill(0);
  order.forEach((g, at) => { rank[g] = at + 1; });
  return { ...found, lived, line, rank, ranked: order.length, edges: edges(found.graph) };
}

function fateOf(g) {
  if (now.isProtected[g]) return "protected";
  return now.ratio[g] === 1 ? "kept" : now.ratio[g] > 0 ? "part" : "evicted";
}

const shareOf = (i) => data.beside.counts[i] / data.beside.groups;

// What the reader does

function drawChoice() {
  marked?.classList.toggle("chosen", false);
  marked = part(`token-${current().token}`);
  marked?.classList.toggle("chosen", true);
  [...part("text").children].forEach((trunk, g) => {
    trunk.setAttribute("aria-selected", g === current().trunk);
    trunk.setAttribute("tabindex", g === chosen.trunk ? 0 : -1);
  });
  drawLine();
  drawGraph();
  drawDetails();
}

function refresh() {
  now = compute();
  drawSummary();
  drawText();
  drawLegend();
  drawChoice();
}

function choose(trunk, token, focus) {
  part("details").classList.add("asked");
  Object.assign(chosen, { trunk, token });
  hovered = null;
  drawChoice();
  if (focus) part(`trunk-${trunk}`).focus();
}

const KEYS = {
  ArrowRight: (g) => Math.min(m - 1, g + 1),
  ArrowLeft: (g) => Math.max(0, g - 1),
  ArrowUp: (g) => now.line[Math.max(0, now.line.indexOf(g) - 1)],
  ArrowDown: (g) => now.line[Math.min(m - 1, now.line.indexOf(g) + 1)],
  Home: () => 0,
  End: () => m - 1,
};

/** Along the tokens, from the first of the chosen trunk. */
function step(along) {
  const next = chosen.token === null ? data.offsets[chosen.trunk] : chosen.token + along;
  return Math.min(n - 1, Math.max(0, next));
}

function walk(event) {
  if (!(event.key in KEYS)) return;
  event.preventDefault();
  const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const token = event.shiftKey && along ? step(along) : null;
  choose(token === null ? KEYS[event.key](chosen.trunk) : trunkOf[token], token, true);
}

function pointed({ target }) {
  const { g, i } = target.dataset;
  return g === undefined ? null : { trunk: Number(g), token: i === undefined ? null : Number(i) };
}

function hover(found) {
  if (found?.trunk === hovered?.trunk && found?.token === hovered?.token) return;
  hovered = found;
  drawChoice();
}

function listen() {
  for (const id of ["text", "line", "graph"]) {
    part(id).addEventListener("pointerover", (event) => event.pointerType === "mouse" && hover(pointed(event)));
    part(id).addEventListener("pointerleave", () => hover(null));
    part(id).addEventListener("click", (event) => {
      const found = pointed(event);
      if (found) choose(found.trunk, found.token, id === "text");
    });
  }
  part("text").addEventListener("keydown", walk);
  part("measure").addEventListener("change", () => { drawText(); drawLegend(); });
}

// Sliders and choices

const SLIDERS = [
  ["tokens", "B: budget in tokens", Math.min(floor, n), n, 1, (x) => `${x} (${percent(x / n)})`],
  ["alpha", "alpha: impact", 0, 2, 0.05, (x) => x.toFixed(2)],
  ["N_min", "N_min: fewest", 0, 32, 1, String],
  ["s", "s: steepness", 0.5, 10, 0.5, (x) => x.toFixed(1)],
];
const CHOICES = [
  ["impact", "Impact", { mixture: "salience, rarity", salience: "salience", uniform: "all equal" }],
  ["graph", "Graph", { degree: "used", zero: "D = 0" }],
];

function slider([name, label, min, max, step, words]) {
  const id = `set-${name}`;
  const input = element("input", { type: "range", id, min, max, step, value: settings[name] });
  const output = element("output", { for: id }, words(Math.min(max, settings[name])));
  input.addEventListener("input", () => {
    settings[name] = Number(input.value);
    output.textContent = words(settings[name]);
    refresh();
  });
  return element("div", { class: "slider" }, element("label", { for: id }, label), output, input);
}

function choice([name, label, options]) {
  const select = element("select", { id: `set-${name}` }, ...Object.entries(options).map(([value, words]) => {
    return element("option", { value }, words);
  }));
  select.value = settings[name];
  select.addEventListener("change", () => {
    settings[name] = select.value;
    refresh();
  });
  return element("label", {}, `${label} `, select);
}

function buildControls() {
  const again = element("button", { type: "button" }, "Reset");
  again.addEventListener("click", () => {
    Object.assign(settings, data.parameters, { tokens: data.tokens });
    buildControls();
    refresh();
  });
  const choices = element("div", { class: "choices" }, ...CHOICES.map(choice), again);
  part("controls").replaceChildren(...SLIDERS.map(slider), choices);
}

function buildMeasures() {
  if (data.beside) {
    const label = `share of the sets of ${data.beside.name} that keep the token`;
    MEASURES.beside = { label, values: () => range(n).map(shareOf), low: 0, high: 1, ofToken: true };
  }
  const options = Object.entries(MEASURES).map(([value, { label }]) => element("option", { value }, label));
  part("measure").append(...options);
  if (data.beside) part("measure").value = "beside";
}

function drawCheck() {
  const same = now.kept.length === data.kept.length && now.kept.every((i, at) => i === data.kept[at]);
  part("check").textContent = same
    ? `Check: with the settings of the run, this page computes the same ${data.kept.length} kept tokens as kvspec.`
    : "Warning: this browser computes a different set of kept tokens than kvspec. Do not trust this page.";
}

part("run").textContent = data.run;
buildMeasures();
buildControls();
buildText();
now = compute();
chosen.trunk = now.line[now.line.findIndex((g) => !now.isProtected[g])] ?? 0;
refresh();
drawCheck();
listen();
