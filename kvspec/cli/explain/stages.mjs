// CrystalCache's prefill in JavaScript, S3 to S6: from what S1 and S2 found of a prompt to the positions that are kept.
//
// To be read beside the paper: a function per item of spec/crystalcache.md, named and ordered as in
// reference/crystalcache, with the paper's symbols. Arrays hold numbers. Sums run left to right, so that results are
// the reference's to the bit, but for `exp` and `log1p`, which are within the items' bounds.

const range = (n) => Array.from({ length: n }, (_, at) => at);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const leftToRightSum = (values) => values.reduce((sum, x) => sum + x, 0);
const total = leftToRightSum;

/** Sizes of the groups between offsets. */
export const sizesOf = (offsets) => range(offsets.length - 1).map((g) => offsets[g + 1] - offsets[g]);

// S3: how distinctly each token entered the cache (Section 3.4)

/** CC-COUNT, Eq. 20: how often the id at position i occurs among all ids, itself included. */
export function tokenCounts(tokenIds) {
  const counts = new Map();
  for (const id of tokenIds) counts.set(id, (counts.get(id) ?? 0) + 1);
  return tokenIds.map((id) => counts.get(id));
}

/** CC-RARITY, Eq. 10 and 21: U_i, the Von Restorff rarity. */
export const rarity = (c) => c.map((count) => 1 / (1 + Math.log1p(count)));

/** CC-IMPACT, Eq. 22: M_i, salience and rarity in equal parts, on the scale of salience. */
export function impact(S, U, { M_min, M_max }) {
  return S.map((salience, i) => clip(M_max * (0.5 * (salience / M_max) + 0.5 * U[i]), M_min, M_max));
}

/** CC-IMPACT: M_i = S_i, which Eq. 11 has clipped already; Table 10, "no Von Restorff". */
export const impactWithoutRarity = (S) => S.map((salience) => salience);

/** CC-IMPACT: M_i = 1; Table 10, "uniform M_i". */
export const uniformImpact = (S) => S.map(() => 1);

/** The three largest, from the largest down; all, if there are fewer. */
function topThree(values) {
  const top = [];
  for (const x of values) {
    if (top.length < 3 || x > top[2]) {
      top.push(x);
      top.sort((y, z) => z - y).splice(3);
    }
  }
  return top;
}

/** CC-TRUNK-IMPACT, Eq. 23: the mean of each trunk's three largest M_i, summed from the largest down. */
export function trunkImpact(M, offsets) {
  return range(offsets.length - 1).map((g) => {
    const top = topThree(M.slice(offsets[g], offsets[g + 1]));
    return leftToRightSum(top) / top.length;
  });
}

// S4: the graph between trunks (Section 3.5)

/** CC-TRUNK-WEIGHT, Eq. 25: W(g_a, g_b) of the pairs that exceed tau_edge, and which pairs those are. */
export function trunkWeights(pairs, sizes, tau_edge) {
  const W = range(pairs.a.length).map((e) => {
    const mean = pairs.total[e] / pairs.edges[e];
    return mean * Math.sqrt(pairs.edges[e] / (sizes[pairs.a[e]] * sizes[pairs.b[e]]));
  });
  const kept = range(W.length).filter((e) => W[e] > tau_edge);
  return { W: kept.map((e) => W[e]), kept };
}

/** Both orientations of each pair a < b, given by (a, b); columns ascend inside a row. */
export function symmetricCsr(a, b, W, m) {
  const rows = range(m).map(() => []);
  W.forEach((weight, e) => rows[b[e]].push([a[e], weight]));
  W.forEach((weight, e) => rows[a[e]].push([b[e], weight]));
  const indptr = [0];
  for (const row of rows) indptr.push(indptr.at(-1) + row.length);
  const entries = rows.flat();
  return { indptr, indices: entries.map(([column]) => column), weights: entries.map(([, weight]) => weight) };
}

/** CC-DEGREE, Eq. 26: the weighted degree of each trunk, summed by ascending neighbour. */
export function degree(indptr, weights) {
  return range(indptr.length - 1).map((g) => leftToRightSum(weights.slice(indptr[g], indptr[g + 1])));
}

/** mu and the population sigma of the degrees; sigma is 1 where it is below epsilon. */
function moments(deg, epsilon) {
  const mu = leftToRightSum(deg) / deg.length;
  const sigma = Math.sqrt(leftToRightSum(deg.map((x) => (x - mu) * (x - mu))) / deg.length);
  return [mu, sigma < epsilon ? 1 : sigma];
}

/** 1 / (1 + exp(-x)) without overflow. */
function logistic(x) {
  const shrunk = Math.exp(-Math.abs(x));
  return (x >= 0 ? 1 : shrunk) / (1 + shrunk);
}

/** CC-CRYSTALLIZATION, Eq. 27: D, the logistic of the standardised degree. */
export function crystallization(deg, s, epsilon) {
  const [mu, sigma] = moments(deg, epsilon);
  return deg.map((x) => logistic(s * ((x - mu) / sigma)));
}

// S5: the two-path score (Section 3.6)

/** CC-NORMALISED-IMPACT, Eq. 28: over the unprotected trunks; NaN where protected. */
export function normalisedImpact(M_bar, isProtected, epsilon) {
  const l = M_bar.map((x) => Math.log1p(x));
  const alive = l.filter((_, g) => !isProtected[g]);
  const low = alive.reduce((x, y) => Math.min(x, y), Infinity);
  const high = alive.reduce((x, y) => Math.max(x, y), -Infinity);
  return l.map((x, g) => (isProtected[g] ? NaN : (x - low) / (high - low + epsilon)));
}

/** CC-SCORE, Eq. 29: either path alone lets a trunk survive; NaN where protected. */
export const score = (D, M_tilde, alpha) => D.map((x, g) => Math.max(x, alpha * M_tilde[g]));

// S6: the budget and dissolution (Section 3.7, Algorithm 1)

/** CC-PROTECTED: whole trunks that touch the sink [0, N_sink) or the recent window [n - W_recent, n). */
export function protectedTrunks(offsets, n, N_sink, W_recent) {
  return range(offsets.length - 1).map((g) => offsets[g] < N_sink || offsets[g + 1] > n - W_recent);
}

/** CC-BUDGET, Eq. 30: B in tokens, never below sink + recent. */
export const effectiveBudget = (tokens, N_sink, W_recent) => Math.max(N_sink + W_recent, tokens);

/** CC-CUT, Eq. 31: c_0, tokens to remove from the unprotected trunks, at most all of them. */
export function cut(sizes, isProtected, B) {
  const B_prot = total(sizes.filter((_, g) => isProtected[g]));
  const T_alive = total(sizes.filter((_, g) => !isProtected[g]));
  return Math.min(Math.max(0, T_alive - (B - B_prot)), T_alive);
}

/** One trunk of Eq. 32, its four branches: how many of its tokens stay in r's numerator, and the cut that is left. */
export function allocateStep(size, c, N_min) {
  if (c <= 0) return [size, c];
  if (size <= c) return [0, c - size];
  if (size - c >= N_min) return [size - c, 0];
  return [0, c - size];
}

/** CC-ALLOCATE, Eq. 32: r of each trunk, given from the lowest score up. */
export function allocate(sizes, c_0, N_min) {
  let c = c_0;
  return sizes.map((size) => {
    const [kept, left] = allocateStep(size, c, N_min);
    c = left;
    return kept / size;
  });
}

function roundHalfToEven(x) {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (below % 2) : Math.round(x);
}

/** CC-KEEP-COUNT, Eq. 33: k_g of a partly dissolved trunk. */
export const keepCount = (r, size, N_min) => Math.min(size, Math.max(N_min, roundHalfToEven(r * size)));

/** Indices of the k largest M_i, lower index first on a tie; ascending. */
export function strongestMembers(M, k) {
  return range(M.length).sort((i, j) => M[j] - M[i]).slice(0, k).sort((i, j) => i - j);
}

/** CC-DISSOLVE-D, Eq. 34: a trunk weakens as much as it was dissolved. */
export const dissolvedD = (D, r) => D.map((x, g) => r[g] * x);

/** Unprotected trunks in the order in which they are evicted: lowest score first, then lowest index. */
export function evictionOrder(scores, isProtected) {
  return range(scores.length).filter((g) => !isProtected[g]).sort((g, h) => scores[g] - scores[h]);
}

/** CC-DISSOLVE, Algorithm 1: an allocation (Stage 1) from the lowest score up, then the strongest members (Stage 2). */
export function dissolve(scores, offsets, M, D, isProtected, B, N_min, allocation = allocate) {
  const sizes = sizesOf(offsets);
  const order = evictionOrder(scores, isProtected);
  const ratio = sizes.map(() => 1);
  const given = allocation(order.map((g) => sizes[g]), cut(sizes, isProtected, B), N_min);
  order.forEach((g, at) => { ratio[g] = given[at]; });
  const kept = range(sizes.length).filter((g) => ratio[g] > 0).flatMap((g) => {
    const first = offsets[g] - offsets[0];
    const k_g = ratio[g] === 1 ? sizes[g] : keepCount(ratio[g], sizes[g], N_min);
    return strongestMembers(M.slice(first, first + sizes[g]), k_g).map((i) => offsets[g] + i);
  });
  return { kept, ratio, D: dissolvedD(D, ratio) };
}

// Algorithm 2, from what S1 and S2 found

const IMPACT = { mixture: impact, salience: impactWithoutRarity, uniform: uniformImpact };

/** S4 from the pairs of trunks that have edges; D is 0 in the ablation graph = "zero". */
export function trunkGraph(pairs, sizes, p) {
  const { W, kept } = trunkWeights(pairs, sizes, p.tau_edge);
  const a = kept.map((e) => pairs.a[e]);
  const b = kept.map((e) => pairs.b[e]);
  const csr = symmetricCsr(a, b, W, sizes.length);
  const deg = degree(csr.indptr, csr.weights);
  return { ...csr, degree: deg, D: p.graph === "zero" ? deg.map(() => 0) : crystallization(deg, p.s, p.epsilon) };
}

/** What is kept of a prompt under a budget in tokens, with every record that led there. */
export function prefill({ token_ids, salience, offsets, pairs }, tokens, p) {
  const c = tokenCounts(token_ids);
  const U = rarity(c);
  const M = IMPACT[p.impact](salience, U, p);
  const M_bar = trunkImpact(M, offsets);
  const graph = trunkGraph(pairs, sizesOf(offsets), p);
  const isProtected = protectedTrunks(offsets, token_ids.length, p.N_sink, p.W_recent);
  const M_tilde = normalisedImpact(M_bar, isProtected, p.epsilon);
  const scores = score(graph.D, M_tilde, p.alpha);
  const B = effectiveBudget(tokens, p.N_sink, p.W_recent);
  const { kept, ratio } = dissolve(scores, offsets, M, graph.D, isProtected, B, p.N_min);
  return { c, U, M, M_bar, graph, isProtected, M_tilde, scores, B, kept, ratio };
}
