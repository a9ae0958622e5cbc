// Published methods: SnapKV, KeyDiff and Knorm, as spec/policies.md has them. Arrays are nested lists.

const dot = (x, y) => x.reduce((sum, a, c) => sum + a * y[c], 0);
const length = (x) => Math.sqrt(dot(x, x));

/** The tokens with the highest scores in ascending order; of equal scores the lower position (PO-TOP-UNITS). */
const best = (scores, number) => {
  const order = [...scores.keys()].sort((i, j) => scores[j] - scores[i] || i - j);
  return order.slice(0, number).sort((i, j) => i - j);
};

/** PO-KEYDIFF: minus the cosine between each key and the mean direction. */
function directions(keys) {
  const unit = keys.map((key) => key.map((x) => x / length(key)));
  const mean = keys[0].map((_, c) => unit.reduce((sum, key) => sum + key[c], 0) / unit.length);
  return unit.map((key) => (length(mean) > 0 ? -dot(key, mean) / length(mean) : 0));
}

/** Attention of one query on the first `seen` keys, beside the sink of its head, if it has one. */
function attention(query, keys, seen, sink, { scaling, softcap }) {
  const logits = keys.slice(0, seen).map((key) => scaling * dot(query, key));
  const capped = softcap === null ? logits : logits.map((x) => softcap * Math.tanh(x / softcap));
  const powers = capped.map((x) => Math.exp(x - Math.max(...capped)));
  const total = powers.reduce((sum, x) => sum + x, Math.exp(sink - Math.max(...capped)));
  return powers.map((x) => x / total);
}

/** PO-SNAPKV: the window's attention, summed, pooled per query head, and averaged over the group. */
function observed(heads, keys, { W, kernel, ...how }) {
  const past = Math.max(0, keys.length - W);
  const pooled = heads.map((head, h) => {
    const sink = how.sinks?.[h] ?? -Infinity;
    const rows = head.slice(past - keys.length).map((q, at) => attention(q, keys, past + at + 1, sink, how));
    const sums = Array.from({ length: past }, (_, j) => rows.reduce((sum, row) => sum + row[j], 0));
    const half = (kernel - 1) / 2;
    return sums.map((_, j) => Math.max(...sums.slice(Math.max(0, j - half), j + half + 1)));
  });
  return Array.from({ length: past }, (_, j) => pooled.reduce((sum, row) => sum + row[j], 0) / pooled.length);
}

const SCORES = {
  snapkv: (keys, head, { q, sinks, ...how }) => {
    const group = q.length / how.H_kv;
    const own = [head * group, (head + 1) * group];
    return observed(q.slice(...own), keys, { ...how, sinks: sinks?.slice(...own) });
  },
  keydiff: directions,
  knorm: (keys) => keys.map((key) => -length(key)),
};

export const METHODS = Object.keys(SCORES);

/** The kept sets of each layer and KV head as a KeptSets; tokens behind the scored ones are protected. */
export function selection(name, { k, q, sinks, n, B, ...given }) {
  const rows = k.flatMap((heads, layer) => heads.map((keys, head) => (
    SCORES[name](keys, head, { ...given, q: q?.[layer], sinks: sinks?.[layer], H_kv: heads.length })
  )));
  const sets = rows.map((row) => {
    const window = Array.from({ length: n - row.length }, (_, at) => row.length + at);
    return [...best(row, Math.max(0, B - window.length)), ...window];
  });
  const offsets = sets.reduce((ends, kept) => [...ends, ends.at(-1) + kept.length], [0]);
  const scores = rows.map((row) => [...row, ...Array(n - row.length).fill("nan")]);
  return { positions: sets.flat(), offsets, scores };
}
