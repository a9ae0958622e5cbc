// Read all vectors and check PO-KNORM, with node alone: `node read.js vectors/*.json`.
"use strict";
const fs = require("fs");
const M = (1n << 64n) - 1n;

function word(seed, t) { // word t of a seed: SplitMix64
  let z = (BigInt(seed) + BigInt(t) * 0x9e3779b97f4a7c15n) & M;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & M;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & M;
  return z ^ (z >> 31n);
}

function floats(x) { // an input of floats: text, lists of it, or the compact form `choice`
  if (typeof x === "string") {
    const [, sign, lead, rest, power] = /^(-?)0x([01])\.([0-9a-f]+)p([+-]\d+)$/.exec(x);
    return (sign ? -1 : 1) * Number(BigInt("0x" + lead + rest)) * 2 ** (Number(power) - 4 * rest.length);
  }
  if (Array.isArray(x)) return x.map(floats);
  const of = floats(x.of);
  const size = x.shape.reduce((a, b) => a * b, 1);
  let flat = Array.from({ length: size }, (_, at) => of[Number(word(x.seed, at + 1) % BigInt(of.length))]);
  for (const size of x.shape.slice(1).reverse()) flat = cut(flat, size);
  return flat;
}
const cut = (list, size) =>
  Array.from({ length: Math.ceil(list.length / size) }, (_, at) => list.slice(at * size, (at + 1) * size));

function knorm(head, B) { // PO-KNORM: the B smallest keys; of equal keys the lower position
  const squares = head.map((key) => key.reduce((sum, x) => sum + x * x, 0));
  const order = squares.map((_, at) => at).sort((a, b) => squares[a] - squares[b] || a - b);
  return order.slice(0, B).sort((a, b) => a - b);
}

let [read, checked, wrong] = [0, 0, 0];
for (const path of process.argv.slice(2)) {
  for (const group of JSON.parse(fs.readFileSync(path, "utf8")).testGroups) {
    read += group.tests.length;
    for (const { tcId, comment, inputs, expected } of group.operation === "PO-KNORM" ? group.tests : []) {
      checked += 1;
      const kept = floats(inputs.k).flat().map((head) => knorm(head, inputs.B));
      if (JSON.stringify(kept) === JSON.stringify(expected.kept)) continue;
      wrong += 1;
      console.log(`tcId ${tcId} is wrong: ${comment}`);
    }
  }
}
console.log(`${read} vectors read, ${checked} of PO-KNORM checked, ${wrong} wrong`);
process.exit(wrong > 0 ? 1 : 0);
