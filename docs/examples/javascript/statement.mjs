// The statement of a server about one eviction (spec/witness.md), in JavaScript.
// `node statement.mjs` reads a statement from standard input, checks its digests, and prints the kept positions.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

/** Returns the digest that commits a server to a kept set. */
export function digestOf(seen, sets, layers) {
  return createHash("sha256").update(JSON.stringify([seen, sets, layers])).digest("hex");
}

/** Returns the entry of `evictions` for the kept positions of each layer and KV head: positions[layer][head]. */
export function evictionOf(seen, positions) {
  const sets = [], known = new Map();
  const layers = positions.map((heads) => heads.map((own) => {
    const ranges = rangesOf(own), key = JSON.stringify(ranges);
    if (!known.has(key)) known.set(key, sets.push(ranges) - 1);
    return known.get(key);
  }));
  return { seen, sets, layers, digest: digestOf(seen, sets, layers) };
}

/** Returns ascending positions as ranges [first, end]. */
function rangesOf(positions) {
  const ranges = [];
  for (const position of positions) {
    const last = ranges.at(-1);
    if (last && last[1] === position) last[1] += 1;
    else ranges.push([position, position + 1]);
  }
  return ranges;
}

if (process.argv[1] === import.meta.filename) {
  for (const { seen, sets, layers, digest } of JSON.parse(readFileSync(0, "utf8")).evictions) {
    if (digest !== digestOf(seen, sets, layers)) throw new Error(`digest = ${digest}: is not the digest of the set`);
    console.log(`after ${seen} tokens: ${sets.map((set) => set.map(([a, b]) => `${a}-${b - 1}`).join(" ")).join(" | ")}`);
  }
}
