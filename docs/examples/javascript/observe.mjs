// CrystalCache's prefill in JavaScript, S1 and S2, and the first step of S4: from the queries and keys of one layer to
// trunks and the pairs of trunks that have edges. stages.mjs goes on from there. In float64.

const range = (n) => Array.from({ length: n }, (_, at) => at);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const sum = (values) => values.reduce((total, x) => total + x, 0);

/** Inner product of the first n entries; four sums side by side, which S1's bounds allow and processors like. */
function dot(x, y, n) {
  let a = 0, b = 0, c = 0, d = 0, i = 0;
  for (; i + 3 < n; i += 4) {
    a += x[i] * y[i];
    b += x[i + 1] * y[i + 1];
    c += x[i + 2] * y[i + 2];
    d += x[i + 3] * y[i + 3];
  }
  for (; i < n; i++) a += x[i] * y[i];
  return a + b + (c + d);
}

// S1: what the observed layer's attention says of each token (Section 3.2)

/** CC-ATTENTION, Eq. 3: softmax weights of one query over the first `seen` keys, all that it sees, and its sink. */
export function attention(query, keys, seen, scaling, softcap, sink = -Infinity) {
  const A = new Float64Array(seen);
  let largest = sink, total = 0;
  for (let j = 0; j < seen; j++) {
    const logit = dot(query, keys[j], query.length) * scaling;
    A[j] = softcap === null ? logit : softcap * Math.tanh(logit / softcap);
    if (A[j] > largest) largest = A[j];
  }
  if (sink > -Infinity) total = Math.exp(sink - largest);
  for (let j = 0; j < seen; j++) {
    A[j] = Math.exp(A[j] - largest);
    total += A[j];
  }
  for (let j = 0; j < seen; j++) A[j] /= total;
  return A;
}

/** The k_heads largest of a token's sums over the chunk's queries, one per head. */
const topHeads = (h, k_heads) => [...h].sort((x, y) => y - x).slice(0, k_heads);

/** CC-SALIENCE, Eq. 11: S_i from a token's sums by head. */
export const salience = (h, p) => clip(sum(topHeads(h, p.k_heads)), p.M_min, p.M_max);

/** CC-MEAN-SALIENCE, the essay's: their mean. */
export function meanSalience(h, p) {
  const top = topHeads(h, p.k_heads);
  return clip(sum(top) / Math.max(1, top.length), p.M_min, p.M_max);
}

/** CC-ROW-NORM, Eq. 12: a row of the head-mean attention, on the chunk's own keys, at unit length. */
export function rowNormalise(row, epsilon) {
  const norm = Math.sqrt(dot(row, row, row.length));
  return row.map((x) => x / (norm + epsilon));
}

/** The k largest weights above tau, compared as float32: best first, the lower column first on a tie; padded. */
export function strongest(weights, k, tau, without = -1) {
  const threshold = Math.fround(tau);
  const [index, keys] = [[], []];
  for (let j = 0; j < weights.length; j++) {
    const key = Math.fround(weights[j]);
    if (j === without || !(key > threshold) || (index.length >= k && !(key > keys.at(-1)))) continue;
    let at = keys.length;
    while (at > 0 && keys[at - 1] < key) at--;
    keys.splice(at, 0, key);
    index.splice(at, 0, j);
    if (index.length > k) [index.length, keys.length] = [k, k];
  }
  const filled = index.concat(Array(k - index.length).fill(-1));
  return { index: filled, weight: filled.map((j) => (j < 0 ? 0 : weights[j])) };
}

/** CC-INTRA, Eq. 13: each token's most similar tokens of its chunk, by the cosine of their rows; row i ends at i. */
export function intraNeighbours(rows, p) {
  const cosine = rows.map(() => new Float64Array(rows.length));
  rows.forEach((row, i) => {
    for (let j = 0; j < i; j++) cosine[i][j] = cosine[j][i] = dot(row, rows[j], j + 1);
  });
  return cosine.map((row, i) => strongest(row, p.k_intra, p.tau_intra, i));
}

/** CC-CROSS, Eq. 14: each token's strongest sources in earlier chunks. */
export const crossNeighbours = (earlier, p) => earlier.map((row) => strongest(row, p.k_cross, p.tau_cross));

/** One chunk's head-mean attention rows, each as long as its query sees, and each token's sums by head. */
function chunkAttention(q, k, first, last, before, scaling, softcap, sinks) {
  const sums = q.map(() => new Float64Array(last - first));
  const mean = range(last - first).map((i) => {
    const row = new Float64Array(first + i + 1);
    q.forEach((head, at) => {
      const keys = k[Math.floor((at * k.length) / q.length)];
      const A = attention(head[first + i - before], keys, row.length, scaling, softcap, sinks?.[at]);
      addTo(row, A);
      addTo(sums[at], A.subarray(first));
    });
    return row.map((x) => x / q.length);
  });
  return { mean, h: range(last - first).map((i) => sums.map((head) => head[i])) };
}

function addTo(sum, values) {
  for (let j = 0; j < values.length; j++) sum[j] += values[j];
}

/** CC-COATTENTION, Section 3.2: S1 over a segment whose keys are the last n of the live ones, in chunks of C tokens. */
export function coattention(q, k, positions, p, scaling, softcap, sinks) {
  const live = k[0].length;
  const before = live - q[0].length;
  const of = { sum: salience, mean: meanSalience }[p.heads];
  const [S, intra, cross] = [[], [], []];
  const absolute = (found, offset) => found.index.map((j) => (j < 0 ? -1 : positions[offset + j]));
  for (let first = before; first < live; first += p.C) {
    const last = Math.min(first + p.C, live);
    const { mean, h } = chunkAttention(q, k, first, last, before, scaling, softcap, sinks);
    S.push(...h.map((sums) => of(sums, p)));
    const rows = mean.map((row) => rowNormalise(row.subarray(first), p.epsilon));
    intra.push(...intraNeighbours(rows, p).map((found) => ({ ...found, index: absolute(found, first) })));
    const earlier = mean.map((row) => row.subarray(0, first));
    cross.push(...crossNeighbours(earlier, p).map((found) => ({ ...found, index: absolute(found, 0) })));
  }
  return {
    start: positions[before], salience: S, intra: intra.map(({ index }) => index),
    intra_weight: intra.map(({ weight }) => weight), cross: cross.map(({ index }) => index),
    cross_weight: cross.map(({ weight }) => weight),
  };
}

/** CC-EDGES, Eq. 15: triples in their order, intra then cross, each by owner, then by rank. */
export function edgesOf({ start, intra, intra_weight, cross, cross_weight }) {
  const triples = (index, weight, triple) => index.flatMap((row, i) =>
    row.map((j, rank) => triple(start + i, j, weight[i][rank])).filter((_, rank) => row[rank] >= 0));
  return [
    ...triples(intra, intra_weight, (owner, neighbour, w) => [owner, neighbour, w]),
    ...triples(cross, cross_weight, (owner, source, w) => [source, owner, w]),
  ];
}

// S2: trunks, the contiguous units of eviction (Section 3.3)

const WINDOW = 5;

/** CC-SENTENCES: sentence i holds tokens offsets[i] to offsets[i + 1]; a token that ends a sentence is its last. */
export function sentenceOffsets(ends) {
  const offsets = [0];
  ends.forEach((end, i) => { if (end || i === ends.length - 1) offsets.push(i + 1); });
  return offsets;
}

/** CC-INTERFACE, Eq. 16: the last five tokens of the running trunk and the first five of the next sentence. */
export function interfaceOf([start, stop], [nextStart, nextStop]) {
  return [[Math.max(start, stop - WINDOW), stop], [nextStart, Math.min(nextStop, nextStart + WINDOW)]];
}

/** CC-INTERFACE-EDGES, Eq. 17: weights of the edges from the trunk's side to the sentence's, by first, then second. */
export function interfaceWeights(byPair, [[start, stop], [nextStart, nextStop]]) {
  const weights = [];
  for (let a = start; a < stop; a++) {
    for (let b = nextStart; b < nextStop; b++) {
      const weight = byPair.get(a)?.get(b);
      if (weight !== undefined) weights.push(weight);
    }
  }
  return weights;
}

/** CC-MERGE, Eq. 18 and 19: whether the sentence joins the trunk. */
export function merges(weights, size, nextSize, tau_merge, T_max) {
  return size + nextSize <= T_max && sum(weights) - tau_merge * weights.length > 0;
}

/** CC-SPLIT: sizes of the ceil(size / T_max) pieces of a trunk; they differ by at most one, larger first. */
export function splitSizes(size, T_max) {
  const pieces = Math.ceil(size / T_max);
  const small = Math.floor(size / pieces);
  return range(pieces).map((at) => small + (at < size - small * pieces ? 1 : 0));
}

/** Sizes of the trunks of Step 2: one pass from left to right. */
export function mergeSentences(sentences, byPair, tau_merge, T_max) {
  let [start, stop] = sentences;
  const sizes = [];
  for (let s = 1; s + 1 < sentences.length; s++) {
    const [nextStart, nextStop] = [sentences[s], sentences[s + 1]];
    const weights = interfaceWeights(byPair, interfaceOf([start, stop], [nextStart, nextStop]));
    if (!merges(weights, stop - start, nextStop - nextStart, tau_merge, T_max)) {
      sizes.push(stop - start);
      start = nextStart;
    }
    stop = nextStop;
  }
  return [...sizes, stop - start];
}

/** The weight of each edge by its first and then its second endpoint. */
export function byPairOf(edges) {
  const byPair = new Map();
  for (const [first, second, weight] of edges) {
    if (!byPair.has(first)) byPair.set(first, new Map());
    byPair.get(first).set(second, weight);
  }
  return byPair;
}

/** CC-TRUNKS, Section 3.3: sentences, merged above `threshold(sentences, byPair)`, then split to at most T_max. */
export function trunkOffsets(ends, edges, p, threshold) {
  const sentences = sentenceOffsets(ends);
  const byPair = byPairOf(edges);
  const merged = mergeSentences(sentences, byPair, threshold(sentences, byPair), p.T_max);
  const offsets = [0];
  for (const size of merged.flatMap((whole) => splitSizes(whole, p.T_max))) offsets.push(offsets.at(-1) + size);
  return offsets;
}

// S4, first step (Section 3.5)

/** CC-TRUNK-EDGES, Eq. 24: size and sum of W_ab for each pair a < b of trunks with an edge, by (a, b). */
export function trunkPairs(edges, offsets) {
  const m = offsets.length - 1;
  const trunkOf = range(m).flatMap((g) => Array(offsets[g + 1] - offsets[g]).fill(g));
  const found = new Map();
  for (const [first, second, weight] of edges) {
    const [g, h] = [trunkOf[first - offsets[0]], trunkOf[second - offsets[0]]];
    if (g === h) continue;
    const pair = Math.min(g, h) * m + Math.max(g, h);
    const [number, total] = found.get(pair) ?? [0, 0];
    found.set(pair, [number + 1, total + weight]);
  }
  const pairs = [...found.keys()].sort((x, y) => x - y);
  return {
    a: pairs.map((pair) => Math.floor(pair / m)), b: pairs.map((pair) => pair % m),
    edges: pairs.map((pair) => found.get(pair)[0]), total: pairs.map((pair) => found.get(pair)[1]),
  };
}
