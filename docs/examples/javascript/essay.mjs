// What spec/crystalcache_essay.md adds to S2, S3 and S6: the essay's forms and the paper's future work.

import { allocateStep, dissolvedD, sizesOf } from "../../../kvspec/cli/explain/stages.mjs";
import { interfaceOf, interfaceWeights } from "./observe.mjs";

const range = (n) => Array.from({ length: n }, (_, at) => at);
const sum = (values) => values.reduce((total, x) => total + x, 0);
const least = (values) => values.reduce((x, y) => Math.min(x, y), Infinity);
const largest = (values) => values.reduce((x, y) => Math.max(x, y), -Infinity);

/** CC-RARITY-FORMS, the paper's F5. */
export const reciprocalRarity = (c) => c.map((count) => 1 / (1 + count));
export const exponentialRarity = (c) => c.map((count) => Math.exp(-count));

/** CC-UNIT-IMPACT: M_i of the essay, on [0, 1]. */
export function unitImpact(S, U) {
  const peak = largest(S);
  return S.map((salience, i) => 0.5 * (peak > 0 ? salience / peak : 0) + 0.5 * U[i]);
}

/** CC-UNIT-TRUNK-IMPACT: Mbar by the least and the greatest of all trunks. */
export function unitTrunkImpact(M_bar, epsilon) {
  const [low, high] = [least(M_bar), largest(M_bar)];
  return M_bar.map((x) => (x - low) / (high - low + epsilon));
}

function nextLarger(x) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, x);
  view.setBigUint64(0, view.getBigUint64(0) + 1n);
  return view.getFloat64(0);
}

/** CC-ADAPTIVE-MERGE, F4: the lower median of the strengths between neighbouring sentences, in place of tau_merge. */
export function medianStrength(sentences, byPair, tau_merge) {
  const strengths = range(Math.max(0, sentences.length - 2)).map((s) => {
    const [start, stop, nextStop] = sentences.slice(s, s + 3);
    const weights = interfaceWeights(byPair, interfaceOf([start, stop], [stop, nextStop]));
    const k = Math.max(1, weights.length);
    const strength = sum(weights) / k;
    return sum(weights) - strength * k <= 0 ? strength : nextLarger(strength);
  });
  const ascending = strengths.sort((x, y) => x - y);
  return ascending.length ? ascending[Math.floor((ascending.length - 1) / 2)] : tau_merge;
}

/** CC-TIER-COUNT: tokens that each trunk, best first, keeps at shift t; exact in integers. */
export function tierCounts(sizes, t, N_min) {
  const m = sizes.length;
  const a = Math.min(Math.max(Math.floor((3 * m) / 10) + t, 0), m);
  const b = Math.min(Math.max(Math.floor((7 * m) / 10) + t, a), m);
  const steps = Math.max(1, b - a - 1);
  return sizes.map((size, rank) => {
    if (rank < a) return size;
    if (rank >= b) return 0;
    const rounded = Math.floor((2 * size * (8 * steps - 3 * (rank - a)) + 10 * steps) / (20 * steps));
    return Math.min(size, Math.max(N_min, rounded));
  });
}

/** CC-TIERS: r of each trunk from the lowest score up; what the tiers keep beyond the budget is cut as in Eq. 32. */
export function tierAllocate(sizes, c_0, N_min) {
  const available = sum(sizes) - c_0;
  const bestFirst = [...sizes].reverse();
  let t = -sizes.length;
  while (sum(tierCounts(bestFirst, t, N_min)) < available) t++;
  const kept = tierCounts(bestFirst, t, N_min).reverse();
  let c = sum(kept) - available;
  return sizes.map((size, g) => {
    const [stays, left] = allocateStep(kept[g], c, N_min);
    c = left;
    return stays / size;
  });
}

/** A float's shortest decimal times a whole number, floored, without rounding. */
function exactShare(share, whole) {
  const [digits, power] = String(share).split("e");
  const [units, rest = ""] = digits.split(".");
  return Number((BigInt(units + rest) * BigInt(whole)) / 10n ** BigInt(rest.length - Number(power ?? 0)));
}

/** CC-COVERAGE, F3: tokens that dissolution leaves to the backfill. */
export function coverageReserve(sizes, isProtected, B, coverage) {
  if (sum(sizes) <= B) return 0;
  return exactShare(coverage, Math.max(0, B - sum(sizes.filter((_, g) => isProtected[g]))));
}

/** CC-COVERAGE: the dissolution, and `reserve` evenly spaced tokens of the trunks that it evicted whole. */
export function backfill({ kept, ratio }, offsets, D, reserve) {
  const sizes = sizesOf(offsets);
  const gone = range(sizes.length).filter((g) => ratio[g] === 0);
  const evicted = gone.flatMap((g) => range(sizes[g]).map((i) => offsets[g] + i));
  const e = evicted.length;
  const added = e <= reserve
    ? evicted : range(reserve).map((i) => evicted[Math.floor(((2 * i + 1) * e) / (2 * reserve))]);
  const filled = ratio.map((r, g) => {
    return r === 0 ? added.filter((i) => offsets[g] <= i && i < offsets[g + 1]).length / sizes[g] : r;
  });
  return { kept: [...kept, ...added].sort((x, y) => x - y), ratio: filled, D: dissolvedD(D, filled) };
}
