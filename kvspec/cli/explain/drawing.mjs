// What the page draws: text, budget line, trunk graph and the chosen trunk, from page.mjs's data, settings and `now`.

// Measures that the text can be shaded by

const MEASURES = {
  scores: { label: "score of the trunk", values: () => now.scores },
  D: { label: "D of the trunk: how central it is", values: () => now.graph.D },
  M_bar: { label: "impact of the trunk", values: () => now.M_bar, log: true },
  M: { label: "impact of the token", values: () => now.M, log: true, ofToken: true },
  salience: { label: "salience of the token", values: () => data.salience, log: true, ofToken: true },
  U: { label: "rarity of the token", values: () => now.U, ofToken: true },
  fate: { label: "nothing: what becomes of it alone", values: () => [] },
};

function scaleOf({ values, low, high, log }) {
  const finite = values().filter(Number.isFinite);
  const bent = log ? Math.log1p : (x) => x;
  const least = finite.reduce((x, y) => Math.min(x, y), low ?? Infinity);
  const most = finite.reduce((x, y) => Math.max(x, y), high ?? -Infinity);
  const [from, to] = [bent(least), bent(most)];
  const strength = (x) => (Number.isFinite(x) && to > from ? (bent(x) - from) / (to - from) : 0);
  return { least, most, middle: log ? Math.expm1((from + to) / 2) : (from + to) / 2, strength };
}

// Text

function buildText() {
  const trunks = sizes.map((size, g) => {
    const tokens = range(size).map((at) => {
      const i = data.offsets[g] + at;
      const line = data.tokens_text[i].includes("\n") ? " line" : "";
      const places = { id: `token-${i}`, "data-i": i, "data-g": g };
      return element("span", { class: `token${line}`, ...places }, data.tokens_text[i]);
    });
    return element("span", { role: "option", id: `trunk-${g}`, "data-g": g, tabindex: -1 }, ...tokens);
  });
  part("text").append(...trunks);
}

function drawText() {
  const measure = MEASURES[part("measure").value];
  const values = measure.values();
  const { strength } = scaleOf(measure);
  [...part("text").children].forEach((trunk, g) => {
    trunk.setAttribute("class", `trunk ${fateOf(g)}`);
    trunk.style.setProperty("--strength", measure.ofToken ? 0 : strength(values[g]));
    [...trunk.children].forEach((token, at) => {
      const i = data.offsets[g] + at;
      token.classList.toggle("gone", !now.lived[i]);
      token.style.setProperty("--strength", measure.ofToken ? strength(values[i]) : 0);
    });
  });
}

function sample(fate, words, gone = false) {
  const token = element("span", { class: gone ? "token gone" : "token" }, words);
  return element("span", { class: `trunk ${fate}` }, token);
}

function drawLegend() {
  const measure = MEASURES[part("measure").value];
  const { least, middle, most } = scaleOf(measure);
  const scale = measure.values().length
    ? [`${shown(least)} `, element("span", { class: "key scale" }), ` ${shown(most)} (middle ${shown(middle)}). `] : [];
  const marks = [
    sample("kept", "kept"), " ", sample("protected", "protected"), " ", sample("part", "kept in part"), " ",
    sample("evicted", "evicted", true),
  ];
  part("legend").replaceChildren(...scale, ...marks);
}

// Budget line: a bar per trunk, as wide as it has tokens, from the best score to the worst

const place = (tokens) => (1000 * tokens) / n;

function bar(g, first, tokens, pale) {
  const high = Math.max(1, settings.alpha);
  const value = now.isProtected[g] ? high : now.scores[g];
  const height = Math.max(2, (118 * value) / high);
  const path = now.isProtected[g] ? "protected" : now.graph.D[g] === now.scores[g] ? "by-D" : "by-M";
  const kind = `bar ${path}${pale ? " pale" : ""}`;
  return element("rect", { class: kind, x: place(first), y: 120 - height, width: place(tokens), height });
}

function bars(g, first) {
  const whole = { x: place(first), y: 0, width: place(sizes[g]), height: 120 };
  const stay = range(sizes[g]).filter((at) => now.lived[data.offsets[g] + at]).length;
  const drawn = [];
  if (stay > 0) drawn.push(bar(g, first, stay, false));
  if (stay < sizes[g]) drawn.push(bar(g, first + stay, sizes[g] - stay, true));
  if (!now.isProtected[g]) {
    const lower = Math.min(now.graph.D[g], settings.alpha * now.M_tilde[g]);
    const y = 120 - (118 * lower) / Math.max(1, settings.alpha);
    drawn.push(element("line", { class: "other", x1: whole.x, x2: whole.x + whole.width, y1: y, y2: y }));
  }
  if (g === current().trunk) drawn.push(element("rect", { class: "chosen", ...whole }));
  return [...drawn, element("rect", { class: "hit", "data-g": g, ...whole })];
}

function drawLine() {
  const stripe = element("line", { class: "stripe", y2: 8 });
  const units = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const pattern = { id: "stripes", width: 8, height: 8, ...units };
  let first = 0;
  const drawn = now.line.flatMap((g) => {
    const found = bars(g, first);
    first += sizes[g];
    return found;
  });
  const x = Math.min(998, place(now.B));
  const cut = element("line", { class: "cut", x1: x, x2: x, y1: 0, y2: 120 });
  part("line").replaceChildren(element("defs", {}, element("pattern", pattern, stripe)), ...drawn, cut);
  part("line").setAttribute("aria-label", `Trunks by score. ${part("summary").textContent}`);
}

function drawSummary() {
  const fates = range(m).map(fateOf);
  const count = (fate) => fates.filter((found) => found === fate).length;
  const over = now.kept.length - now.B;
  const said = [
    `${plural(m, "trunk")}: ${count("protected")} protected, ${count("kept")} kept, ${count("part")} kept in`
      + ` part, ${count("evicted")} evicted.`,
  ];
  if (over > 0) said.push(`The protected trunks have ${over} tokens more than the budget.`);
  const never = `The first ${settings.N_sink} and the last ${settings.W_recent} tokens are never evicted`;
  if (n <= floor) said.push(`${never}, and the prompt has no other tokens.`);
  part("summary").textContent = `${now.kept.length} of ${plural(n, "token")} kept`
    + ` (${percent(now.kept.length / n)}), budget ${now.B}`;
  part("fates").textContent = said.join(" ");
  if (data.beside) part("beside").textContent = besideSaid();
}

function besideSaid() {
  const { name, groups, counts } = data.beside;
  const kept = total(counts) / groups;
  const both = total(now.kept.map(shareOf));
  const sets = groups === 1 ? "one set for all heads" : `mean over ${groups} sets, one set for ${data.beside.granularity}`;
  return `${name} keeps ${kept.toFixed(0)} tokens (${sets}). Both policies keep ${both.toFixed(0)} tokens,`
    + ` only CrystalCache ${(now.kept.length - both).toFixed(0)}, only ${name} ${(kept - both).toFixed(0)}.`;
}

// Trunk graph: trunks along the text, shaded by D, and arcs between them

function middleOf(g) {
  return place(data.offsets[g] - data.offsets[0] + sizes[g] / 2);
}

const reach = ({ a, b }) => middleOf(b) - middleOf(a);

function arc(edge, size, ofChosen) {
  const [x, y] = [middleOf(edge.a), middleOf(edge.b)];
  const depth = 20 + 240 * Math.sqrt(reach(edge) / size.distance);
  const strength = edge.W / size.W;
  return element("path", {
    class: ofChosen ? "link of-chosen" : "link", d: `M${x} 16Q${(x + y) / 2} ${depth} ${y} 16`,
    "stroke-width": 0.5 + 3.5 * strength, "stroke-opacity": ofChosen ? 1 : 0.1 + 0.7 * strength,
  });
}

function drawGraph() {
  const all = now.edges;
  const { trunk } = current();
  const size = { W: all[0]?.W, distance: all.reduce((most, edge) => Math.max(most, reach(edge)), 0) };
  const strip = range(m).map((g) => element("rect", {
    class: "place", "data-g": g, x: place(data.offsets[g] - data.offsets[0]), y: 0, width: place(sizes[g]), height: 14,
    "fill-opacity": 0.1 + 0.9 * now.graph.D[g],
  }));
  const mark = element("rect", {
    class: "chosen", x: place(data.offsets[trunk] - data.offsets[0]), y: 0, width: place(sizes[trunk]), height: 15,
  });
  const mine = all.filter(({ a, b }) => a === trunk || b === trunk).map((edge) => arc(edge, size, true));
  const others = all.slice(0, STRONGEST).map((edge) => arc(edge, size, false));
  part("graph").replaceChildren(...strip, ...others, ...mine, mark);
  const links = plural(all.length, "link");
  const which = all.length > STRONGEST ? `The ${STRONGEST} strongest of ${links}` : `All ${links}`;
  const said = all.length
    ? `${which} between trunks, from ${shown(all.at(-1).W)} (thin) to ${shown(size.W)} (thick). Links of the chosen`
      + " trunk have a different colour. The strip shows D from the start to the end of the text."
    : `No link between trunks exceeds tau_edge = ${settings.tau_edge}, so all trunks have the same D.`;
  part("graph-legend").textContent = said;
  part("graph").setAttribute("aria-label", said);
}

// The chosen trunk in numbers

function why(g) {
  const { N_sink, W_recent } = settings;
  const kept = range(sizes[g]).filter((j) => now.lived[data.offsets[g] + j]).length;
  const path = now.graph.D[g] === now.scores[g] ? "D (the graph)" : "the impact";
  const held = now.ratio.filter((r, h) => r > 0 && !now.isProtected[h]).length;
  const order = `rank ${now.rank[g]} of ${now.ranked}. The budget has room for ${held} trunks`;
  const ranked = `The score comes from ${path}. The score has ${order}.`;
  return {
    protected: `Protected, because the trunk contains one of the first ${N_sink} or last ${W_recent} tokens.`,
    kept: `Kept. ${ranked}`,
    part: `Kept in part: of ${sizes[g]} tokens, the ${kept} tokens with the largest impact are kept. ${ranked}`,
    evicted: `Evicted. ${ranked}`,
  }[fateOf(g)];
}

function list(pairs) {
  return element("dl", {}, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function linksOf(g) {
  const mine = now.edges.filter(({ a, b }) => a === g || b === g).slice(0, 6);
  const buttons = mine.map(({ a, b, W }) => {
    const other = a === g ? b : a;
    const button = element("button", { type: "button" }, `trunk ${other}: ${shown(W)}`);
    button.addEventListener("click", () => choose(other, null, true));
    return button;
  });
  const said = mine.length ? "Strongest links: " : "No link to another trunk.";
  return element("div", { class: "links" }, said, ...buttons);
}

function drawDetails() {
  const { trunk: g, token: i } = current();
  const [start, stop] = [data.offsets[g], data.offsets[g + 1]];
  const parts = [
    element("h2", {}, `Trunk ${g}: ${sizes[g] === 1 ? `token ${start}` : `tokens ${start} to ${stop - 1}`}`),
    element("p", {}, why(g)),
    list([
      ["score", shown(now.scores[g])], ["kept, r", shown(now.ratio[g])], ["D", shown(now.graph.D[g])],
      ["degree", shown(now.graph.degree[g])], ["impact, normalised", shown(now.M_tilde[g])],
      ["impact", shown(now.M_bar[g])],
    ]),
  ];
  if (i !== null) {
    const { name, counts, groups } = data.beside ?? {};
    const beside = data.beside ? [[`sets of ${name}`, `${counts[i]} of ${groups}`]] : [];
    const fate = now.lived[i] ? "is kept" : "is evicted";
    parts.push(
      element("p", {}, `Token ${i}, `, element("q", {}, data.tokens_text[i]), `, ${fate}:`),
      list([
        ["salience", shown(data.salience[i])], ["occurs", `${now.c[i]} ×`], ["rarity", shown(now.U[i])],
        ["impact", shown(now.M[i])], ...beside,
      ]),
    );
  }
  part("details").replaceChildren(...parts, linksOf(g));
}
